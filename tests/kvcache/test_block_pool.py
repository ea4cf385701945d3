"""Blocks: who uses them, in which order they are reused, and by which hash they are found."""

from __future__ import annotations

import pytest

from quire.kvcache.block_pool import NULL_BLOCK_ID, BlockPool


def hash_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


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
        pool.remember(block, 0, hash_of(number))
    pool.release([c])
    pool.release([a, d])
    pool.release([b])
    assert [pool.take() for _ in range(4)] == [c, a, d, b]


def test_blocks_that_nobody_can_find_go_first_the_last_released_before_all() -> None:
    pool = BlockPool(5)
    a, b, c = (pool.take() for _ in range(3))
    pool.remember(b, 0, hash_of(7))
    pool.release([a])
    pool.release([b])
    pool.release([c])
    assert free_ids(pool) == [c.block_id, a.block_id, 4, b.block_id]


def test_blocks_that_were_never_used_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    block = pool.take()
    pool.remember(block, 0, hash_of(7))
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
    pool.remember(block, 0, hash_of(7))
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
    pool.remember(first, 0, hash_of(7))
    pool.remember(second, 0, hash_of(7))
    assert pool.lookup_all(0, [hash_of(7)]) == [first]
    assert second.block_hash is None
    pool.release([second])
    pool.take()
    assert pool.lookup_all(0, [hash_of(7)]) == [first]


def test_a_block_keeps_the_hash_it_has() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.remember(block, 0, hash_of(7))
    pool.remember(block, 0, hash_of(8))
    assert block.block_hash == (0, hash_of(7))
    assert pool.lookup_all(0, [hash_of(8)]) == []


def test_kv_groups_do_not_see_each_others_blocks() -> None:
    pool = BlockPool(3)
    a, b = pool.take(), pool.take()
    pool.remember(a, 0, hash_of(7))
    assert pool.lookup_all(1, [hash_of(7)]) == []
    pool.remember(b, 1, hash_of(7))
    assert pool.lookup_all(0, [hash_of(7)]) == [a]
    assert pool.lookup_all(1, [hash_of(7)]) == [b]


def test_a_lookup_ends_at_the_first_block_that_is_missing() -> None:
    pool = BlockPool(4)
    blocks = [pool.take() for _ in range(3)]
    for number in (0, 1, 3):
        pool.remember(blocks[min(number, 2)], 0, hash_of(number))
    assert pool.lookup_all(0, map(hash_of, range(4))) == blocks[:2]


def test_forgetting_all_leaves_the_users_their_blocks() -> None:
    pool = BlockPool(3)
    used, free = pool.take(), pool.take()
    pool.remember(used, 0, hash_of(1))
    pool.remember(free, 0, hash_of(2))
    pool.release([free])
    pool.forget_all()
    assert pool.lookup_all(0, [hash_of(1)]) == pool.lookup_all(0, [hash_of(2)]) == []
    assert used.ref_cnt == 1
    assert free_ids(pool) == [2]
    assert used.block_hash is free.block_hash is None
