"""ALiBi by two more elements a head gives the scores that the paper's bias gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.layers.alibi import AlibiSlopes
from support.layers import build_layer, draw

# From the paper's own code (get_slopes) for powers of two, and beyond by its rule.
SLOPES = {
    1: [2**-8],
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    8: [2.0**-i for i in range(1, 9)],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
}


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("qhd,khd->hqk", q, k)


@pytest.mark.parametrize("heads", SLOPES)
def test_scores_grow_by_the_slope_times_the_position_of_the_key(heads):
    alibi, _ = build_layer(lambda builder: AlibiSlopes(heads, range(heads), builder))
    q, k, v = (draw(name, 6, heads, 8) for name in "qkv")
    positions = torch.tensor([0, 1, 2, 255, 256, 1000])
    more_q, more_k, more_v = alibi.extend(q, k, v, positions)
    bias = torch.tensor(SLOPES[heads])[:, None, None] * positions
    torch.testing.assert_close(scores(more_q, more_k), scores(q, k) + bias, rtol=1e-5, atol=1e-3)
    assert torch.equal(more_v, torch.nn.functional.pad(v, (0, 2)))


def test_one_key_head_serves_several_queries():
    alibi, _ = build_layer(lambda builder: AlibiSlopes(4, range(4), builder))
    q, k = draw("q", 3, 4, 8), draw("k", 3, 1, 8)
    more_q, more_k, _ = alibi.extend(q, k, k, torch.tensor([3, 4, 5]))
    assert (more_q.shape, more_k.shape) == ((3, 4, 10), (3, 1, 10))


def test_a_rank_has_the_slopes_of_its_heads():
    alibi, _ = build_layer(lambda builder: AlibiSlopes(8, range(4, 8), builder))
    assert alibi.slopes.tolist() == SLOPES[8][4:]


def test_positions_are_exact_in_bfloat16():
    alibi, _ = build_layer(lambda builder: AlibiSlopes(1, range(1), builder))
    positions = torch.tensor([0, 255, 256, 257, 32_767, 65_535])
    k = torch.zeros(6, 1, 8, dtype=torch.bfloat16)
    _, more_k, _ = alibi.extend(k, k, k, positions)
    assert more_k[:, 0, 8:].double().sum(-1).tolist() == positions.tolist()
