"""Prefix matching, allocation and windows, without a scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from quire.kv.hashing import extra_keys
from quire.kv.manager import KVCacheManager
from quire.kv.specs import KVCacheSpec, attention_spec
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import BlockTableEdits
from quire.scheduler.request import Request

BLOCK_SIZE = 4
FULL = [attention_spec([0])]
WINDOW = [attention_spec([0], window=6)]
MIXED = [attention_spec([0]), attention_spec([1], window=6)]


def make_manager(specs: list[KVCacheSpec] = FULL, num_blocks: int = 64, chunk: int = 64) -> KVCacheManager:
    return KVCacheManager(num_blocks, specs, BLOCK_SIZE, chunk)


def make_request(tokens: list[int], salt: str | None = None, ranges: Sequence[tuple[int, int, str]] = ()) -> Request:
    source = EngineCoreRequest("r", tokens, SamplingParams(), 0, 16)
    return Request(source, (0, 0.0, 0), extra_keys(BLOCK_SIZE, salt, ranges))


def compute(kv: KVCacheManager, request: Request, num_tokens: int) -> None:
    """As a scheduled and retired step would."""
    assert kv.allocate(request, num_tokens, BlockTableEdits())
    request.num_computed_tokens = num_tokens
    kv.hash_full_blocks(request)
    request.num_retired_tokens = num_tokens


def enter(
    kv: KVCacheManager, tokens: list[int], salt: str | None = None, ranges: Sequence[tuple[int, int, str]] = ()
) -> tuple[Request, int]:
    """A request that computes all its tokens in one step, and the number of those that it found."""
    request = make_request(tokens, salt, ranges)
    num_cached = kv.admit(request)
    assert num_cached is not None
    request.num_retired_tokens = request.num_computed_tokens = num_cached
    compute(kv, request, len(tokens))
    return request, num_cached


def ids(request: Request, group: int = 0) -> list[int]:
    return [block.block_id for block in request.blocks.tables[group]]


def test_room_is_counted_in_requests_of_the_full_length() -> None:
    kv = make_manager([attention_spec([0, 1]), attention_spec([2], 6)], num_blocks=1 + 35, chunk=4)
    assert kv.max_blocks(16) == 4 + 4
    assert kv.room(16) == 35 / 8
    assert kv.kept_share(16) == (2 * 16 + 6) / (8 * BLOCK_SIZE * 2)
    assert make_manager().kept_share(16) == 1


def test_a_request_gets_the_blocks_of_its_cached_prefix() -> None:
    kv = make_manager()
    first, cached = enter(kv, list(range(10)))
    assert (cached, ids(first)) == (0, [1, 2, 3])
    second, cached = enter(kv, [*range(8), 70, 71])
    assert (cached, ids(second)) == (8, [1, 2, 4])
    third, cached = enter(kv, [*range(7), 70, 71])
    assert (cached, ids(third)) == (4, [1, 5, 6])
    assert [kv.pool.blocks[i].ref_cnt for i in (1, 2, 3)] == [3, 2, 1]


def test_of_a_prompt_that_is_cached_whole_the_last_token_is_left() -> None:
    kv = make_manager()
    enter(kv, list(range(12)))
    assert enter(kv, list(range(9)))[1] == 8
    assert enter(kv, list(range(8)))[1] == 4  # whole blocks: the last block is computed again, into an own block


def test_a_cache_salt_keeps_requests_apart() -> None:
    kv = make_manager()
    enter(kv, list(range(10)))
    enter(kv, list(range(10)), salt="a")
    assert enter(kv, list(range(10)), salt="b")[1] == 0
    assert enter(kv, list(range(10)), salt="a")[1] == 8


def test_text_before_a_picture_is_shared_and_what_follows_another_picture_is_not() -> None:
    kv = make_manager()
    enter(kv, [7] * 22, ranges=[(9, 14, "cat")])
    assert enter(kv, [7] * 22, ranges=[(9, 14, "dog")])[1] == 8
    assert enter(kv, [7] * 22)[1] == 8
    assert enter(kv, [7] * 22, ranges=[(9, 14, "cat")])[1] == 20


def test_engines_with_equal_fingerprints_name_blocks_alike() -> None:
    hashes = []
    for fingerprint in ("one model", "one model", "another model"):
        request, _ = enter(KVCacheManager(64, FULL, BLOCK_SIZE, 64, fingerprint=fingerprint), list(range(10)))
        hashes.append(request.block_hashes)
    assert hashes[0] == hashes[1]
    assert not set(hashes[0]) & set(hashes[2])


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = KVCacheManager(64, FULL, BLOCK_SIZE, 64, enable_prefix_caching=False)
    enter(kv, list(range(10)))
    assert enter(kv, list(range(10)))[1] == 0


def test_after_a_reset_nothing_is_found_and_running_requests_go_on() -> None:
    kv = make_manager()
    first, _ = enter(kv, list(range(10)))
    kv.reset_prefix_cache()
    assert enter(kv, list(range(10)))[1] == 0
    first.token_ids.extend([7, 7, 7])
    compute(kv, first, 13)
    kv.free(first)


def test_tails_are_evicted_before_the_heads_that_others_share() -> None:
    kv = make_manager(num_blocks=1 + 4)
    document = list(range(12))
    first, _ = enter(kv, [*document, 50])
    kv.free(first)
    tail, _ = enter(kv, [90])
    body, _ = enter(kv, [91])
    assert (ids(tail), ids(body)) == ([4], [3])  # the partial block, then the last full one
    kv.free(tail)
    kv.free(body)
    again = make_request([*document, 50])
    assert kv.admit(again) == 8
    assert ids(again) == [1, 2]


def test_a_request_without_room_for_all_its_tokens_is_given_nothing() -> None:
    kv = make_manager(num_blocks=1 + 6)
    first, _ = enter(kv, list(range(16)))
    request = make_request([*range(8), *range(50, 63)])  # six blocks, of which two are shared: two too many
    free = [block.block_id for block in kv.pool.free_list]
    assert kv.admit(request) is None
    assert request.blocks.tables == []
    assert [block.block_id for block in kv.pool.free_list] == free
    assert [block.ref_cnt for block in first.blocks.tables[0]] == [1, 1, 1, 1]
    assert kv.admit(make_request([*range(8), *range(50, 58)])) == 8


def test_cached_blocks_that_nobody_uses_are_not_counted_twice() -> None:
    kv = make_manager(num_blocks=1 + 4)
    first, _ = enter(kv, list(range(12)))
    kv.free(first)
    assert kv.admit(make_request(list(range(20)))) is None  # five blocks; of the four, three are the cached ones
    assert kv.admit(make_request(list(range(16)))) == 12


def test_allocating_too_much_changes_nothing() -> None:
    kv = make_manager(num_blocks=1 + 3)
    request, _ = enter(kv, list(range(6)))
    edits = BlockTableEdits()
    assert not kv.allocate(request, 13, edits)
    assert (edits.block_ids, ids(request), kv.pool.num_free, request.blocks.capacity) == ([], [1, 2], 1, 8)
    request.row = 5
    assert kv.allocate(request, 12, edits)
    assert (edits.groups, edits.rows, edits.indices, edits.block_ids) == ([0], [5], [2], [3])


def test_tokens_within_the_last_block_need_no_edit() -> None:
    kv = make_manager()
    request, _ = enter(kv, list(range(5)))
    edits = BlockTableEdits()
    assert kv.allocate(request, 8, edits)
    assert edits.block_ids == []


def test_blocks_that_fell_out_of_the_window_are_freed_when_the_request_grows() -> None:
    kv = make_manager(WINDOW)
    request, _ = enter(kv, list(range(16)))
    assert ids(request) == [1, 2, 3, 4]
    request.token_ids.append(99)
    compute(kv, request, 17)  # the query at 16 sees 11..16
    assert ids(request) == [0, 0, 3, 4, 5]
    assert [block.ref_cnt for block in kv.pool.blocks[1:6]] == [0, 0, 1, 1, 1]


def test_blocks_that_a_submitted_step_still_sees_are_kept() -> None:
    kv = make_manager(WINDOW)
    request, _ = enter(kv, list(range(16)))
    request.num_retired_tokens = 8  # the step of 8..15 is in flight: its first query sees 3..8
    assert kv.allocate(request, 17, BlockTableEdits())
    assert ids(request) == [1, 2, 3, 4, 5]
    request.num_retired_tokens = 13  # sees 8..13
    assert kv.allocate(request, 21, BlockTableEdits())
    assert ids(request) == [0, 0, 3, 4, 5, 6]


def test_a_request_that_is_admitted_again_gives_blocks_back_as_before() -> None:
    kv = make_manager(WINDOW)
    request, _ = enter(kv, list(range(24)))
    request.token_ids.append(99)
    compute(kv, request, 25)
    kv.free(request)
    kv.reset_prefix_cache()
    assert kv.admit(request) == request.num_cached_tokens == 0
    request.num_retired_tokens = 0
    for end in (8, 16, 17):
        compute(kv, request, end)
    assert ids(request)[:2] == [0, 0]
    assert all(ids(request)[2:])


def test_full_attention_keeps_what_a_window_lets_go() -> None:
    kv = make_manager(MIXED)
    request, _ = enter(kv, list(range(16)))
    assert (ids(request, 0), ids(request, 1)) == ([1, 2, 3, 4], [5, 6, 7, 8])
    compute(kv, request, 16)
    assert kv.allocate(request, 17, BlockTableEdits())
    assert (ids(request, 0), ids(request, 1)) == ([1, 2, 3, 4, 9], [0, 0, 7, 8, 10])


def test_of_a_window_a_prefix_needs_only_the_last_blocks() -> None:
    kv = make_manager(WINDOW)
    first, _ = enter(kv, list(range(16)))
    for block in first.blocks.tables[0][:2]:
        kv.pool.forget(block)
    request = make_request([*range(16), 99])
    assert kv.admit(request) == 16  # the query at 16 sees 11..16
    assert ids(request) == [0, 0, 3, 4]
    assert kv.admit(make_request([*range(12), 99])) == 0  # the query at 12 sees 7: in a block that is gone


def test_full_attention_needs_the_first_blocks_whatever_the_window_kept() -> None:
    kv = make_manager(MIXED)
    first, _ = enter(kv, list(range(16)))
    kv.pool.forget(first.blocks.tables[0][3])
    request = make_request([*range(16), 99])
    assert kv.admit(request) == 12
    assert (ids(request, 0), ids(request, 1)) == ([1, 2, 3], [0, 6, 7])


def test_a_withdrawn_step_takes_its_hashes_back_and_no_others() -> None:
    kv = make_manager()
    request = make_request(list(range(16)))
    kv.admit(request)
    compute(kv, request, 6)
    compute(kv, request, 16)
    kv.withdraw_hashes(request, 6)
    assert kv.admit(make_request(list(range(16)))) == 4


def longest_prefix(kv: KVCacheManager, hashes: list[bytes], limit: int) -> tuple[int, list[list[int]]]:
    """The definition: try every length, longest first."""
    for length in range(limit, -1, -1):
        tables = []
        for group, spec in enumerate(kv.specs):
            first = spec.first_needed_token(length * BLOCK_SIZE) // BLOCK_SIZE
            found = [kv.pool.lookup_all(group, [block_hash]) for block_hash in hashes[first:length]]
            if not all(found):
                break
            tables.append([0] * first + [blocks[0].block_id for blocks in found])
        else:
            return length, tables
    raise AssertionError("the empty prefix always matches")


@pytest.mark.parametrize("windows", [[None], [6], [1], [None, 6], [None, 3, 13], [9, 6]])
def test_the_longest_prefix_is_found_whatever_was_evicted(windows: list[int | None]) -> None:
    dice = random.Random(str(windows))
    for _ in range(150):
        kv = make_manager([attention_spec([g], window) for g, window in enumerate(windows)], num_blocks=200)
        tokens = [dice.randrange(100) for _ in range(dice.randint(1, 50))]
        first, _ = enter(kv, tokens)
        evicted = dice.choice([0.05, 0.1, 0.4])
        for table in first.blocks.tables:
            for block in table:
                if dice.random() < evicted:
                    kv.pool.forget(block)
        request = make_request(tokens)
        num_cached = kv.admit(request)
        length, tables = longest_prefix(kv, request.block_hashes, (len(tokens) - 1) // BLOCK_SIZE)
        assert (num_cached, [ids(request, g) for g in range(len(windows))]) == (length * BLOCK_SIZE, tables)
