"""The op that counts which sampled tokens are kept, against a loop over the places."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from quire.ops.registry import Implementation, Target
from support.implementations import for_cpus

IMPLEMENTATIONS = for_cpus("count_kept")


def expected(token_ids: torch.Tensor, rows: list[int], positions: list[int], sampled: list[int], places: list[int]):
    kept, start = [], 0
    for count in places:
        number = 0
        for place in range(start, start + count):
            number += 1
            if token_ids[rows[place], positions[place] + 1] != sampled[place]:
                break
        kept.append(number)
        start += count
    return kept


@pytest.mark.sampled(2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=[i.name for i in IMPLEMENTATIONS])
@pytest.mark.parametrize("seed", range(20))
def test_drafts_are_kept_up_to_the_first_that_differs(implementation: Implementation, seed: int):
    if not implementation.supports(Target(torch.device("cpu"), torch.float32)):
        pytest.skip("not supported here")
    check_count_kept(implementation.function, seed)


def check_count_kept(function: Callable[..., torch.Tensor], seed: int) -> None:
    draw = np.random.default_rng(seed)
    requests = int(draw.integers(1, 9))
    token_ids = torch.from_numpy(draw.integers(0, 3, (10, 40)).astype(np.int32))
    row_of = draw.permutation(10)[:requests].tolist()
    places = draw.choice([0, 1, 1, 2, 5, 8], requests).tolist()
    first = draw.integers(0, 30, requests).tolist()
    rows = [row for row, count in zip(row_of, places, strict=True) for _ in range(count)]
    positions = [start + i for start, count in zip(first, places, strict=True) for i in range(count)]
    sampled = [
        int(token_ids[row, position + 1]) if draw.random() < 0.7 else 2
        for row, position in zip(rows, positions, strict=True)
    ]
    made = function(
        token_ids,
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(sampled, dtype=torch.int64),
        torch.tensor([0, *np.cumsum(places)]),
    )
    assert made.tolist() == expected(token_ids, rows, positions, sampled, places)
