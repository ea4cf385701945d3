"""Chained hashes of full blocks: equal hashes mean equal tokens in front, whoever sent them."""

from array import array
from hashlib import sha256

import msgspec

ROOT = sha256(b"quire kv block, v1").digest()  # the parent of every first block


def encode_extra_keys(*keys: str | int | None) -> bytes:
    """Bytes for what, besides its tokens, decides a block's content: adapter, image hashes, cache salt. 32, or none.

    They become part of each block's hash, so they are short, however long the keys are.
    """
    return b"" if all(key is None for key in keys) else sha256(msgspec.msgpack.encode(keys)).digest()


def hash_block(parent: bytes, token_ids: list[int], extra_keys: bytes = b"") -> bytes:
    """SHA-256 of (parent hash, token ids, extra keys). 32 bytes.

    The parent has a fixed length and the count of tokens is fixed by the block size, so that the plain concatenation
    is unambiguous.
    """
    return sha256(parent + array("i", token_ids).tobytes() + extra_keys).digest()


def extend_hashes(hashes: list[bytes], token_ids: list[int], block_size: int, extra_keys: bytes = b"") -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not cover yet."""
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else ROOT
        hashes.append(hash_block(parent, token_ids[start : start + block_size], extra_keys))
