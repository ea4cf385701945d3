"""Recurrent states, and a spec that no model has yet, run through the real manager."""

from __future__ import annotations

import numpy as np

from quire.kv.hashing import extra_keys
from quire.kv.manager import KVCacheManager
from quire.kv.specs import CacheEntry, KVCacheSpec, StateSpec, attention_spec
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import BlockTableEdits
from quire.scheduler.request import Request
from support.kv_specs import HeadBudgetSpec

BLOCK_SIZE = 4
STATE = StateSpec((CacheEntry(1, "state"),))
HEADS = HeadBudgetSpec((CacheEntry(1),), budgets=(4, 16, 8))


def make_manager(*specs: KVCacheSpec, num_blocks: int = 64, chunk: int = 64) -> KVCacheManager:
    return KVCacheManager(num_blocks, list(specs), BLOCK_SIZE, max_num_batched_tokens=chunk)


def admit(kv: KVCacheManager, tokens: list[int]) -> Request:
    source = EngineCoreRequest("r", tokens, SamplingParams(), 0, 16)
    request = Request(source, (0, 0.0, 0), extra_keys(BLOCK_SIZE))
    num_cached = kv.admit(request)
    assert num_cached is not None
    request.num_cached_tokens = request.num_retired_tokens = request.num_computed_tokens = num_cached
    return request


def step(kv: KVCacheManager, request: Request, end: int) -> None:
    """A step that computes the request's tokens up to `end`, and retires."""
    schedule(kv, request, end)
    kv.end_step()
    request.num_retired_tokens = end


def schedule(kv: KVCacheManager, request: Request, end: int) -> None:
    assert kv.allocate(request, end, BlockTableEdits())
    request.num_computed_tokens = end
    kv.hash_full_blocks(request)


def held(request: Request, group: int) -> list[int]:
    """The indices of the table that have a block."""
    return [index for index, block in enumerate(request.blocks.tables[group]) if block.block_id]


def test_a_step_that_is_shorter_than_a_block_reads_and_stores_states_in_two_blocks_at_most() -> None:
    assert [STATE.max_blocks(1000, chunk, BLOCK_SIZE) for chunk in (1, 2, 3)] == [2, 2, 2]


def test_a_state_takes_the_same_memory_however_long_the_request() -> None:
    kv = make_manager(STATE, num_blocks=5, chunk=8)
    assert [kv.max_blocks(length) for length in (1, 4, 5, 1000)] == [1, 1, 2, 4]
    request = admit(kv, list(range(1000)))
    for end in (3, 5, 13, 21, *range(22, 1000)):
        step(kv, request, end)
        assert held(request, 0)[-1] == (end - 1) // BLOCK_SIZE
        assert len(held(request, 0)) <= (4 if end <= 24 else 2)
    kv.free(request)
    assert kv.pool.num_free == kv.pool.num_usable


def test_a_request_starts_behind_the_last_checkpoint_of_a_state() -> None:
    kv = make_manager(attention_spec([0]), STATE)
    first = admit(kv, list(range(40)))
    for end in (8, 14, 31, 40):
        step(kv, first, end)
    found = {length: admit(kv, [*range(length), 99]).num_cached_tokens for length in (7, 8, 15, 19, 20, 33, 40)}
    assert found == {7: 4, 8: 8, 15: 12, 19: 16, 20: 20, 33: 32, 40: 40}
    second = admit(kv, [*range(20), 99])
    assert held(second, 0) == [0, 1, 2, 3, 4]
    assert held(second, 1) == [4]


def test_a_prefix_ends_where_its_state_is_still_known() -> None:
    """The states of a text are evicted one by one. What is left of its keys is of no use without one of them."""
    kv = make_manager(attention_spec([0]), STATE)
    first = admit(kv, list(range(40)))
    step(kv, first, 40)
    for index in (9, 8, 7):
        kv.pool.forget(first.blocks.tables[1][index])
    assert admit(kv, [*range(40), 99]).num_cached_tokens == 28


def test_a_state_is_shared_only_by_later_steps_than_the_one_that_computes_it() -> None:
    kv = make_manager(STATE)
    schedule(kv, admit(kv, list(range(8))), 8)
    assert admit(kv, [*range(8), 99]).num_cached_tokens == 0
    kv.end_step()
    assert admit(kv, [*range(8), 99]).num_cached_tokens == 8


def test_a_withdrawn_step_leaves_no_checkpoint() -> None:
    kv = make_manager(STATE)
    request = admit(kv, list(range(8)))
    step(kv, request, 4)
    step(kv, request, 8)
    kv.withdraw_hashes(request, 4)
    assert admit(kv, [*range(8), 99]).num_cached_tokens == 4


def test_heads_with_budgets_of_their_own_take_blocks_of_their_own() -> None:
    kv = make_manager(attention_spec([0]), HEADS)
    request = admit(kv, list(range(40)))
    counts = []
    for end in (1, 4, 5, 8, 12, 16, 40):
        step(kv, request, end)
        counts.append((len(held(request, 0)), len(held(request, 1))))
        assert len(held(request, 1)) == HEADS.max_blocks(end, 64, BLOCK_SIZE)
    assert counts == [(1, 3), (1, 3), (2, 5), (2, 5), (3, 6), (4, 7), (10, 7)]
    assert kv.max_blocks(40) == 10 + 7


def test_what_depends_on_later_tokens_is_never_shared() -> None:
    kv = make_manager(attention_spec([0]), HEADS)
    step(kv, admit(kv, list(range(40))), 40)
    assert admit(kv, [*range(40), 99]).num_cached_tokens == 0
    alone = make_manager(attention_spec([0]))
    step(alone, admit(alone, list(range(40))), 40)
    assert admit(alone, [*range(40), 99]).num_cached_tokens == 40


def test_slots_may_differ_by_head() -> None:
    kv = make_manager(HEADS)
    request = admit(kv, list(range(40)))
    step(kv, request, 40)
    table = np.array([[block.block_id for block in request.blocks.tables[0]]], np.int32)
    positions = np.arange(24, 40)
    slots = HEADS.slots(table, np.zeros(len(positions), np.int64), positions, BLOCK_SIZE)  # [tokens, heads]
    assert slots.shape == (16, 3)
    for head, budget in enumerate(HEADS.budgets):
        assert len(set(slots[-budget:, head].tolist())) == budget
    last = [slots[-budget:, head].tolist() for head, budget in enumerate(HEADS.budgets)]
    assert len({slot for of_head in last for slot in of_head}) == sum(HEADS.budgets)
