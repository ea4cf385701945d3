"""Prefix-cache events in vLLM's format (vllm/distributed/kv_events.py, the variant with arrays).

A hash stands for a block and all tokens before it. Quire sends integers, the last 8 bytes of its hashes; vLLM may send
bytes.
"""

import msgspec

BlockHash = int | bytes
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)  # the number that follows the last batch of a replay


class BlockStored(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Consecutive blocks were cached. parent_block_hash: hash of the block before them, None at the start of a text.
    medium: the kind of memory; "GPU" is the engine's own cache, also on CPUs. extra_keys: for each block, the inputs of
    its hash other than tokens and adapter, such as the cache salt. The last three: see `KVEvents`."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, gc=False):
    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, gc=False):
    pass


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """The changes since the previous batch. ts: time.time()"""

    ts: float
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = None
