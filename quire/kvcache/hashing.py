"""Chained hashes of full blocks: equal hashes mean equal content, whoever computed it."""

from array import array
from collections.abc import Iterable, Mapping
from hashlib import sha256

import msgspec


def hash_root(fingerprint: str) -> bytes:
    """The parent of every first block, 32 bytes.

    fingerprint: all that decides the bytes of a block besides its tokens, such as the model, the types and the layout.
    Blocks may be exchanged between engines whose fingerprints are equal.
    """
    return sha256(b"quire kv block, v2: " + fingerprint.encode()).digest()


def extra_keys(
    block_size: int, salt: str | None = None, ranges: Iterable[tuple[int, int, str]] = ()
) -> dict[int, bytes]:
    """What becomes part of the hashes besides tokens: block index -> 32 bytes. Most blocks of most requests have none.

    ranges: (start, end, key): the content of the tokens from start to end - 1 depends on what the key stands for, for
    example a picture. It becomes part of the blocks that the range touches, and through their hashes of all later
    ones; earlier blocks stay sharable. The salt becomes part of the first block, and so of all.
    """
    keys: dict[int, list[tuple[int, int, str]]] = {}
    if salt is not None:
        keys[0] = [(0, 0, salt)]  # an empty range, which no other key has
    for start, end, key in sorted(ranges):
        for index in range(start // block_size, -(-end // block_size)):
            begin = index * block_size
            keys.setdefault(index, []).append((start - begin, end - begin, key))
    return {index: sha256(msgspec.msgpack.encode(of_block)).digest() for index, of_block in keys.items()}


def extend_hashes(
    hashes: list[bytes], token_ids: list[int], block_size: int, root: bytes, extra: Mapping[int, bytes]
) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not cover yet.

    A hash is SHA-256 of (parent hash, token ids, extra keys). The parent has a fixed length and the count of tokens is
    fixed by the block size, so that the plain concatenation is unambiguous.
    """
    parent = hashes[-1] if hashes else root
    for index in range(len(hashes), len(token_ids) // block_size):
        content = parent + array("i", token_ids[index * block_size : (index + 1) * block_size]).tobytes()
        if extra:
            content += extra.get(index, b"")
        parent = sha256(content).digest()
        hashes.append(parent)
