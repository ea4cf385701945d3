"""Hashes of full blocks: a chain over a canonical encoding, from a root for each kind of block; extra keys."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from struct import pack

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kv.hashing import extend_hashes, extra_keys, hash_root

ROOT = hash_root("a model")
Range = tuple[int, int, str]
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=24)


def hashes_of(
    tokens: list[int], block_size: int = 4, salt: str | None = None, ranges: Iterable[Range] = (), root: bytes = ROOT
) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size, root, extra_keys(block_size, salt, ranges))
    return hashes


def test_the_hash_is_sha256_of_the_parent_the_tokens_and_the_extra_keys() -> None:
    tokens = [1, 2, 3, 4, 500_000, 6, 7, 8]
    first = sha256(sha256(b"quire kv block, v2: a model").digest() + pack("<4i", *tokens[:4])).digest()
    second = sha256(first + pack("<4i", *tokens[4:])).digest()
    assert hashes_of(tokens) == [first, second]
    salted = sha256(
        ROOT + pack("<4i", *tokens[:4]) + sha256(b"\x91\x93\x00\x00\xa5salty").digest()
    ).digest()  # msgpack of [(0, 0, "salty")]
    assert hashes_of(tokens[:4], salt="salty") == [salted]


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes_of([5] * length)) for length in (0, 3, 4, 5, 7, 8)] == [0, 0, 1, 1, 1, 2]


def test_equal_tokens_after_another_beginning_have_another_hash() -> None:
    assert hashes_of([1, 1, 1, 1, 7, 7, 7, 7])[1] != hashes_of([2, 1, 1, 1, 7, 7, 7, 7])[1]
    assert len(set(hashes_of([7] * 16))) == 4


def test_a_cache_salt_isolates() -> None:
    assert extra_keys(4) == {}
    chains = [hashes_of([1] * 8, salt=salt) for salt in (None, "", "a", "b")]
    assert len({block_hash for chain in chains for block_hash in chain}) == 8


def test_each_kind_of_block_has_hashes_of_its_own() -> None:
    chains = [hashes_of([1] * 8, root=hash_root(name)) for name in ("", "a model", "another model")]
    assert len({block_hash for chain in chains for block_hash in chain}) == 6
    assert hashes_of([1] * 8, root=hash_root("a model")) == chains[1]


def test_extra_keys_cannot_be_confused() -> None:
    keys: list[tuple[str | None, list[Range]]] = [
        (None, []),
        ("a", []),
        (None, [(0, 4, "a")]),
        (None, [(0, 3, "a")]),
        (None, [(1, 4, "a")]),
        ("a", [(0, 4, "a")]),
        (None, [(0, 2, "a"), (2, 4, "b")]),
        (None, [(0, 2, "b"), (2, 4, "a")]),
        (None, [(0, 4, "ab")]),
        (None, [(1, 2, "a"), (3, 4, "")]),
    ]
    assert len({hashes_of([7] * 4, salt=salt, ranges=ranges)[0] for salt, ranges in keys}) == len(keys)


def test_text_before_a_picture_stays_sharable() -> None:
    text, cat, dog = (hashes_of([7] * 24, ranges=r) for r in ([], [(9, 14, "cat")], [(9, 14, "dog")]))
    assert text[:2] == cat[:2] == dog[:2]
    for index in (2, 3, 4, 5):  # those of the picture, and those behind it
        assert len({text[index], cat[index], dog[index]}) == 3
    assert hashes_of([7] * 24, ranges=[(9, 14, "cat")]) == cat
    assert hashes_of([7] * 24, ranges=[(10, 15, "cat")])[2:] != cat[2:]


def test_a_second_picture_spoils_only_what_follows_it() -> None:
    one = hashes_of([7] * 24, ranges=[(1, 6, "cat")])
    two = hashes_of([7] * 24, ranges=[(17, 20, "dog"), (1, 6, "cat")])
    assert one[:4] == two[:4]
    assert one[4] != two[4]
    assert hashes_of([7] * 24, ranges=[(1, 6, "cat"), (17, 20, "dog")]) == two


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 23), st.integers(1, 9), st.sampled_from("ab")), max_size=3),
    st.lists(st.tuples(st.integers(0, 23), st.integers(1, 9), st.sampled_from("ab")), max_size=3),
)
def test_blocks_are_shared_as_far_as_tokens_and_keys_are_equal(a: list[Range], b: list[Range]) -> None:
    """Against the definition: which keys apply at each token, and where their ranges begin and end."""
    first, second = ([(start, start + length, key) for start, length, key in keys] for keys in (a, b))
    for index, (x, y) in enumerate(
        zip(hashes_of([7] * 24, ranges=first), hashes_of([7] * 24, ranges=second), strict=True)
    ):
        end = 4 * (index + 1)
        assert (x == y) == (sorted(r for r in first if r[0] < end) == sorted(r for r in second if r[0] < end))


def test_the_tokens_boundaries_cannot_be_confused() -> None:
    assert hashes_of([1, 2], block_size=2) != hashes_of([1 + 2 * 256], block_size=1)
    assert hashes_of([0x0102, 3], block_size=2) != hashes_of([0x01, 0x0203], block_size=2)


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.integers(1, 6), st.lists(st.integers(0, 24), max_size=4))
def test_extending_in_pieces_gives_the_hashes_of_the_whole(tokens: list[int], block_size: int, cuts: list[int]) -> None:
    pieces: list[bytes] = []
    for cut in sorted(cuts):
        extend_hashes(pieces, tokens[:cut], block_size, ROOT, {})
    extend_hashes(pieces, tokens, block_size, ROOT, {})
    assert pieces == hashes_of(tokens, block_size)


@settings(max_examples=60, deadline=None)
@given(TOKENS, TOKENS, TOKENS)
def test_hashes_are_equal_as_far_as_the_tokens_are(head: list[int], a: list[int], b: list[int]) -> None:
    first, second = head + a, head + b
    for index, (x, y) in enumerate(zip(hashes_of(first), hashes_of(second), strict=False)):
        end = 4 * (index + 1)
        assert (x == y) == (first[:end] == second[:end])
