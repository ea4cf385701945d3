"""Hashes of full blocks: a chain, over a canonical encoding, apart for each salt."""

from __future__ import annotations

from hashlib import sha256
from struct import pack

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kvcache.hashing import ROOT, encode_extra_keys, extend_hashes, hash_block

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=24)


def hashes_of(tokens: list[int], block_size: int = 4, salt: str | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size, encode_extra_keys(salt))
    return hashes


def test_the_hash_is_sha256_of_the_parent_the_tokens_and_the_extra_keys() -> None:
    tokens = [1, 2, 3, 4, 500_000, 6, 7, 8]
    first = sha256(sha256(b"quire kv block, v1").digest() + pack("<4i", *tokens[:4])).digest()
    second = sha256(first + pack("<4i", *tokens[4:])).digest()
    assert hashes_of(tokens) == [first, second]
    salted = sha256(
        ROOT + pack("<4i", *tokens[:4]) + sha256(b"\x91\xa5salty").digest()
    ).digest()  # msgpack of ["salty"]
    assert hashes_of(tokens[:4], salt="salty") == [salted]


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes_of([5] * length)) for length in (0, 3, 4, 5, 7, 8)] == [0, 0, 1, 1, 1, 2]


def test_equal_tokens_after_another_beginning_have_another_hash() -> None:
    assert hashes_of([1, 1, 1, 1, 7, 7, 7, 7])[1] != hashes_of([2, 1, 1, 1, 7, 7, 7, 7])[1]
    assert len(set(hashes_of([7] * 16))) == 4


def test_a_cache_salt_isolates() -> None:
    assert encode_extra_keys(None) == b""
    chains = [hashes_of([1] * 8, salt=salt) for salt in (None, "", "a", "b")]
    assert len({block_hash for chain in chains for block_hash in chain}) == 8


def test_extra_keys_cannot_be_confused() -> None:
    keys = [("a", None), (None, "a"), ("a",), ("a", "b"), ("ab",), ("ab", None), (1,), ("1",), (None, 1)]
    assert len({encode_extra_keys(*key) for key in keys}) == len(keys)


def test_the_tokens_boundaries_cannot_be_confused() -> None:
    assert hash_block(ROOT, [1, 2]) != hash_block(ROOT, [1 + 2 * 256])
    assert hash_block(ROOT, [0x0102, 3]) != hash_block(ROOT, [0x01, 0x0203])


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.integers(1, 6), st.lists(st.integers(0, 24), max_size=4))
def test_extending_in_pieces_gives_the_hashes_of_the_whole(tokens: list[int], block_size: int, cuts: list[int]) -> None:
    pieces: list[bytes] = []
    for cut in sorted(cuts):
        extend_hashes(pieces, tokens[:cut], block_size)
    extend_hashes(pieces, tokens, block_size)
    assert pieces == hashes_of(tokens, block_size)


@settings(max_examples=60, deadline=None)
@given(TOKENS, TOKENS, TOKENS)
def test_hashes_are_equal_as_far_as_the_tokens_are(head: list[int], a: list[int], b: list[int]) -> None:
    first, second = head + a, head + b
    for index, (x, y) in enumerate(zip(hashes_of(first), hashes_of(second), strict=False)):
        end = 4 * (index + 1)
        assert (x == y) == (first[:end] == second[:end])
