"""Blocks: who uses them, in which order they are reused, and by which hash they are found."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv.block_pool import NULL_BLOCK_ID, BlockPool, HashedTokens
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.scheduler.request import Request


def hash_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


TOKENS = Request(EngineCoreRequest("r", [1], SamplingParams(), 0, 1), (0, 0.0, 0), {})
TOKENS.block_hashes = [hash_of(index) for index in range(10)]


def free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_list]


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(4)
    taken = [pool.take().block_id for _ in range(pool.num_usable)]
    assert taken == [1, 2, 3]
    assert NULL_BLOCK_ID not in taken
    assert pool.num_free == 0


def test_releasing_the_null_block_does_nothing() -> None:
    pool = BlockPool(3)
    pool.release([pool.null_block, pool.null_block])
    assert pool.null_block.ref_cnt == 0
    assert free_ids(pool) == [1, 2]


def test_taking_from_an_empty_pool_is_an_error() -> None:
    pool = BlockPool(2)
    pool.take()
    with pytest.raises(AssertionError, match="empty"):
        pool.take()


def test_blocks_are_reused_in_the_order_in_which_they_were_released() -> None:
    pool = BlockPool(5)
    a, b, c, d = blocks = [pool.take() for _ in range(4)]
    for number, block in enumerate(blocks):
        pool.remember(block, 0, TOKENS, number)
    pool.release([c])
    pool.release([a, d])
    pool.release([b])
    assert [pool.take() for _ in range(4)] == [c, a, d, b]


def test_blocks_that_nobody_can_find_go_first_the_last_released_before_all() -> None:
    pool = BlockPool(5)
    a, b, c = (pool.take() for _ in range(3))
    pool.remember(b, 0, TOKENS, 7)
    pool.release([a])
    pool.release([b])
    pool.release([c])
    assert free_ids(pool) == [c.block_id, a.block_id, 4, b.block_id]


def test_blocks_that_were_never_used_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    block = pool.take()
    pool.remember(block, 0, TOKENS, 7)
    pool.release([block])
    assert free_ids(pool) == [2, 3, 1]


def test_a_shared_block_is_free_only_when_its_last_user_releases_it() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.share(block)
    pool.release([block])
    assert block.ref_cnt == 1
    assert free_ids(pool) == [2]
    pool.release([block])
    assert free_ids(pool) == [1, 2]


def test_a_released_block_is_found_until_it_is_taken_again() -> None:
    pool = BlockPool(3)
    block = pool.take()
    pool.remember(block, 0, TOKENS, 7)
    pool.release([block])
    assert pool.lookup_all(0, [hash_of(7)]) == [block]
    pool.take()
    assert pool.take() is block
    assert pool.lookup_all(0, [hash_of(7)]) == []
    assert block.block_hash is None


def test_sharing_a_free_block_takes_it_out_of_the_middle_of_the_free_list() -> None:
    pool = BlockPool(4)
    blocks = [pool.take() for _ in range(3)]
    pool.release(blocks)
    pool.share(blocks[1])
    assert free_ids(pool) == [3, 1]
    assert pool.num_free == 2
    assert blocks[1].ref_cnt == 1


def test_the_first_block_with_a_hash_stays_its_owner() -> None:
    pool = BlockPool(3)
    first, second = pool.take(), pool.take()
    pool.remember(first, 0, TOKENS, 7)
    pool.remember(second, 0, TOKENS, 7)
    assert pool.lookup_all(0, [hash_of(7)]) == [first]
    assert second.block_hash is None
    pool.release([second])
    pool.take()
    assert pool.lookup_all(0, [hash_of(7)]) == [first]


def test_a_block_keeps_the_hash_it_has() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.remember(block, 0, TOKENS, 7)
    pool.remember(block, 0, TOKENS, 8)
    assert block.block_hash == (0, hash_of(7))
    assert pool.lookup_all(0, [hash_of(8)]) == []


def test_kv_groups_do_not_see_each_others_blocks() -> None:
    pool = BlockPool(3)
    a, b = pool.take(), pool.take()
    pool.remember(a, 0, TOKENS, 7)
    assert pool.lookup_all(1, [hash_of(7)]) == []
    pool.remember(b, 1, TOKENS, 7)
    assert pool.lookup_all(0, [hash_of(7)]) == [a]
    assert pool.lookup_all(1, [hash_of(7)]) == [b]


def test_a_lookup_ends_at_the_first_block_that_is_missing() -> None:
    pool = BlockPool(4)
    blocks = [pool.take() for _ in range(3)]
    for number in (0, 1, 3):
        pool.remember(blocks[min(number, 2)], 0, TOKENS, number)
    assert pool.lookup_all(0, map(hash_of, range(4))) == blocks[:2]


def test_forgetting_all_leaves_the_users_their_blocks() -> None:
    pool = BlockPool(3)
    used, free = pool.take(), pool.take()
    pool.remember(used, 0, TOKENS, 1)
    pool.remember(free, 0, TOKENS, 2)
    pool.release([free])
    pool.forget_all()
    assert pool.lookup_all(0, [hash_of(1)]) == pool.lookup_all(0, [hash_of(2)]) == []
    assert used.ref_cnt == 1
    assert free_ids(pool) == [2]
    assert used.block_hash is free.block_hash is None


class Ledger:
    """A listener that believes what it is told, and refuses contradictions."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, bytes], int] = {}
        self.events: list[str] = []

    def on_stored(self, group: int, tokens: HashedTokens, index: int, block_id: int) -> None:
        block_hash = tokens.block_hashes[index]
        assert (group, block_hash) not in self.blocks, "stored twice"
        assert block_id not in self.blocks.values(), "a block has two hashes"
        self.blocks[group, block_hash] = block_id
        self.events.append("stored")

    def on_removed(self, group: int, block_hash: bytes, block_id: int) -> None:
        assert self.blocks.pop((group, block_hash)) == block_id, "another block was removed"
        self.events.append("removed")

    def on_cleared(self) -> None:
        self.blocks.clear()
        self.events.append("cleared")


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["take", "share", "release", "remember", "forget", "forget all"]),
        st.integers(0, 7),
        st.integers(0, 1),
        st.integers(0, 4),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(MOVES)
def test_listeners_know_at_any_time_which_block_has_which_hash(moves: list[tuple[str, int, int, int]]) -> None:
    """Against a model: who holds which block how often, and the first owner of each hash."""
    pool, ledgers = BlockPool(5), [Ledger(), Ledger()]
    pool.listeners += ledgers
    uses: dict[int, int] = {}
    owners: dict[tuple[int, bytes], int] = {}
    for move, number, group, content in moves:
        block = pool.blocks[1 + number % 4]
        block_id, key = block.block_id, (group, hash_of(content))
        if move == "take" and pool.num_free:
            taken = pool.take().block_id
            assert taken not in uses
            owners = {key: owner for key, owner in owners.items() if owner != taken}
            uses[taken] = 1
        elif move == "share" and block_id in (*uses, *owners.values()):
            pool.share(block)
            uses[block_id] = uses.get(block_id, 0) + 1
        elif move == "release" and block_id in uses:
            pool.release([block])
            uses[block_id] -= 1
            uses = {held: count for held, count in uses.items() if count}
        elif move == "remember" and block_id in uses:
            pool.remember(block, group, TOKENS, content)
            if block_id not in owners.values():
                owners.setdefault(key, block_id)
        elif move == "forget":
            pool.forget(block)
            owners = {key: owner for key, owner in owners.items() if owner != block_id}
        elif move == "forget all":
            pool.forget_all()
            owners = {}
        assert {b.block_id: b.ref_cnt for b in pool.blocks if b.ref_cnt} == uses
        assert all(ledger.blocks == owners for ledger in ledgers)
        assert sorted(free_ids(pool)) == [i for i in range(1, 5) if i not in uses]


def test_a_listener_hears_of_a_removal_before_the_block_gets_other_content() -> None:
    pool, ledger = BlockPool(2), Ledger()
    pool.listeners.append(ledger)
    block = pool.take()
    pool.remember(block, 0, TOKENS, 7)
    pool.remember(block, 0, TOKENS, 8)
    pool.release([block])
    assert ledger.events == ["stored"]
    pool.take()
    assert ledger.events == ["stored", "removed"]
