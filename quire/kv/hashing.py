"""Chained hashes of full blocks. Blocks with equal hashes have equal content, regardless of the request."""

from array import array
from collections.abc import Iterable, Mapping
from hashlib import sha256

import msgspec

from quire.messages.engine import EngineCoreRequest


def hash_root(fingerprint: str) -> bytes:
    """Return the parent of every first block, 32 bytes.

    fingerprint: everything except the tokens that determines a block's bytes, such as the model, the types and the
    layout. Engines with equal fingerprints may exchange blocks.
    """
    return sha256(b"quire kv block, v2: " + fingerprint.encode()).digest()


def extra_keys(
    block_size: int, salt: str | None = None, ranges: Iterable[tuple[int, int, str]] = (), adapter: str | None = None
) -> dict[int, bytes]:
    """Return the extra keys that are hashed in addition to a block's tokens: block index -> 32 bytes. Most blocks have
    none.

    ranges: (start, end, key): the content of the tokens from start to end - 1 depends on the item named by the key, for
    example an image. The key changes the hashes of the blocks in the range and of all later blocks. Earlier blocks can
    still be shared. salt and adapter (the key of a LoRA adapter) change the hash of the first block and therefore of
    all blocks.
    """
    keys: dict[int, list[tuple[int, int, str]]] = {}
    if salt is not None:
        keys[0] = [(0, 0, salt)]  # no other key has an empty range
    if adapter is not None:
        keys.setdefault(0, []).append((-1, -1, adapter))  # no other key has a negative one
    for start, end, key in sorted(ranges):
        for index in range(start // block_size, -(-end // block_size)):
            begin = index * block_size
            keys.setdefault(index, []).append((start - begin, end - begin, key))
    return {index: sha256(msgspec.msgpack.encode(block_keys)).digest() for index, block_keys in keys.items()}


def request_keys(block_size: int, source: EngineCoreRequest) -> dict[int, bytes]:
    """Return the extra keys of a request, from its salt, media and adapter."""
    ranges = [(item.place.start, item.place.end, item.place.key) for item in source.media]
    adapter = source.adapter.key if source.adapter else None
    return extra_keys(block_size, source.cache_salt, ranges, adapter)


def extend_hashes(
    hashes: list[bytes], token_ids: list[int], block_size: int, root: bytes, extra: Mapping[int, bytes]
) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not cover yet.

    A hash is SHA-256 of (parent hash, token ids, extra keys). Their plain concatenation is unambiguous, since the
    length of the parent hash is fixed and the block size fixes the number of token ids.
    """
    parent = hashes[-1] if hashes else root
    for index in range(len(hashes), len(token_ids) // block_size):
        content = parent + array("i", token_ids[index * block_size : (index + 1) * block_size]).tobytes()
        if extra:
            content += extra.get(index, b"")
        parent = sha256(content).digest()
        hashes.append(parent)
