"""The plan of attention by length (Triton's interpreter), against the same plan in Python and dense attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")
import torch
from attention.test_attention import FLOAT32, World, build

from benchmarks.gpu.attention_work import Item, plan_items
from quire.attention.base import AttentionShape, StepLayout
from quire.attention.triton import attention_backend
from quire.attention.triton.attention_backend import TritonAttention, TritonPlan
from quire.ops.triton.targets import INTERPRETED
from quire.platform.gpu.cards import CARDS

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.skipif(not INTERPRETED, reason="the plans of this test are in the memory of the host"),
]

H200 = CARDS["sm_90"]
SHORT = [(575, 1)] * 255
BATCHES = {
    "one stream": [(319, 1)],
    "a long stream": [(99_999, 1)],
    "even": [(575, 1)] * 256,
    "skewed": [(99_999, 1), *SHORT],
    "skewed, the long one in the middle": [*SHORT[:100], (65_535, 1), *SHORT[100:]],
    "skewed, with drafts": [(40_000, 4)] + [(300, 4)] * 31,
    "mixed": [(99_999, 1), (0, 700), (4096, 512), *SHORT[:60]],
    "a prompt": [(0, 8192)],
    "requests without tokens": [(0, 0), (70, 3), (0, 0), (20_000, 1), (0, 0)],
    "two prompts": [(0, 300), (0, 17)],
}


def layout_of(requests: list[tuple[int, int]], uniform: int = 0, width: int = 8192) -> StepLayout:
    starts = torch.tensor([0, *(new for _, new in requests)]).cumsum(0).int()
    lengths = torch.tensor([cached + new for cached, new in requests], dtype=torch.int32)
    table = torch.zeros(len(requests), 1, dtype=torch.int32).expand(-1, width)
    slots = torch.zeros(int(starts[-1]), dtype=torch.int64)
    return StepLayout(starts, lengths, slots, table, tokens_per_request=uniform)


def planned(requests: list[tuple[int, int]], **shape: int) -> TritonPlan:
    """The plan of a step of Llama-3-8B on an H200."""
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128} | shape
    backend = TritonAttention(AttentionShape(**sizes, block_size=16, dtype=torch.bfloat16, device=torch.device("cpu")))
    backend._card = H200
    counts = {new for _, new in requests}
    return backend.plan(layout_of(requests, counts.pop() if len(counts) == 1 else 0))


def items_of(plan: TritonPlan) -> tuple[list[Item], list[list[int]]]:
    """The items in the order of programs, and the rows of merges."""
    header = plan.work[0].tolist()
    rows = plan.work[1 : 1 + plan.items].tolist()
    keys = plan.tile.keys
    items = [
        Item(request, first, begin // keys, end // keys, index < header[0])
        for index, (request, first, begin, end) in enumerate(rows)
        if request >= 0
    ]
    return items, plan.work[1 + plan.items :][: header[1]].tolist()


def in_python(requests: list[tuple[int, int]], plan: TritonPlan) -> list[Item]:
    counts = [new for _, new in requests]
    lengths = [cached + new for cached, new in requests]
    fewest = max(1, attention_backend._FEWEST_KEYS // plan.tile.keys)
    most = attention_backend._MOST_PARTS
    return plan_items(counts, lengths, plan.tokens, plan.tile.keys, plan.parts, fewest, most)


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_items_are_those_of_the_plan_in_python(requests: list[tuple[int, int]]) -> None:
    plan = planned(requests)
    items, merges = items_of(plan)
    expected = in_python(requests, plan)
    assert sorted(items, key=str) == sorted(expected, key=str)
    divided = sum(item.is_divided for item in expected)
    assert divided <= plan.partials
    assert len(expected) <= plan.items
    assert len(merges) <= plan.merges
    assert all(item.is_divided for item in items[:divided]), "they start first"
    for request, first, at, count in merges:
        parts = items[at : at + count]
        assert {(item.request, item.first) for item in parts} == {(request, first)}
        assert [item.begin for item in parts] == [0, *(item.end for item in parts[:-1])]
    assert sum(count for *_, count in merges) == divided


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 1), (71, 1), (128, 128)])
def test_no_item_of_a_skewed_batch_has_much_more_than_its_share(heads: int, kv_heads: int) -> None:
    requests = BATCHES["skewed"]
    plan = planned(requests, num_heads=heads, num_kv_heads=kv_heads)
    items, _ = items_of(plan)
    sizes = [item.end - item.begin for item in items]
    share = max(sum(sizes) / plan.parts, 2)
    assert max(sizes) <= max(share + 1, 100_000 / plan.tile.keys / attention_backend._MOST_PARTS + 1, 9)


def test_a_short_table_divides_nothing() -> None:
    backend = build(TritonAttention, 4, 2, 32, 16, FLOAT32)
    plan = backend.plan(layout_of([(90, 1), (20, 1)], 1, width=8))
    assert not plan.partials
    assert plan.items == 2


SKEWED = {
    "decode": [(3, 1), (700, 1), (17, 1), (40, 1)],
    "drafts": [(3, 3), (700, 3), (17, 3)],
    "mixed": [(3, 1), (700, 1), (5, 20), (40, 1)],
    "two long ones": [(500, 2), (0, 1), (601, 1), (17, 9)],
}


@pytest.mark.parametrize(
    ("requests", "options"),
    [
        (SKEWED["decode"], {}),
        (SKEWED["drafts"], {"soft_cap": 3.0}),
        (SKEWED["mixed"], {}),
        (SKEWED["mixed"], {"window": 40}),
        (SKEWED["two long ones"], {"window": 300, "sinks": torch.linspace(-2, 3, 4)}),
        (SKEWED["decode"], {"sinks": torch.linspace(-2, 3, 4)}),
    ],
    ids=["decode", "drafts", "mixed", "window", "window and sinks", "sinks"],
)
def test_skewed_batches_have_the_results_of_dense_attention(requests, options) -> None:
    backend = build(TritonAttention, 4, 2, 32, 16, FLOAT32)
    backend._card = replace(backend._card, processors=12)
    world = World(backend, requests)
    assert backend.plan(world.layout(world.requests)).work[0, 1] > 0, "something is divided"
    world.check(**options)


def test_a_plan_is_divided_again_for_another_step() -> None:
    backend = build(TritonAttention, 4, 2, 32, 16, FLOAT32)
    backend._card = replace(backend._card, processors=12)
    worlds = [World(backend, requests, seed=i) for i, requests in enumerate([[(700, 1), (9, 1)], [(5, 1), (650, 1)]])]
    first, then = worlds
    plan = backend.plan(first.layout(first.requests))
    memory = plan.work.data_ptr()
    plan = backend.plan(then.layout(then.requests), plan)
    assert plan.work.data_ptr() == memory
    made = backend.attend(torch.cat(then.q), then.cache, plan, scale=0.2)
    wanted = backend.attend(torch.cat(then.q), then.cache, backend.plan(then.layout(then.requests)), scale=0.2)
    assert torch.equal(made[0], wanted[0])
    assert torch.equal(made[1], wanted[1])
