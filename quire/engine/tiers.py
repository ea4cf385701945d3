"""Creates the scheduler's half of the tiers from the options."""

import os
from functools import partial
from pathlib import Path

from quire.config.engine import EngineConfig
from quire.kv.specs import KVCacheSize
from quire.kv.tiers import MEMORY_VARIABLE, DiskTier, MemoryTier, SlotIndex, Tier, block_path, memory_slots
from quire.messages.errors import error_text
from quire.observability.logging import logger


def make_tiers(config: EngineConfig, kv: KVCacheSize, root: bytes) -> list[Tier]:
    """Return the tiers in lookup order. root: of the hashes, see `hash_root`."""
    options = config.cache
    ranks = config.parallel.ranks
    tiers = list[Tier]()
    if options.kv_offloading_bytes:
        num_slots = memory_slots(options.kv_offloading_bytes, kv.rank_bytes)
        index = None
        if kept := os.environ.get(MEMORY_VARIABLE):
            try:
                index = SlotIndex(Path(kept), num_slots, root)
            except OSError as error:
                logger.warning("Blocks in CPU memory will not survive this process: %s", error_text(error))
        tier = MemoryTier(len(tiers), num_slots, index)
        found = f", of which {len(tier):,} are filled" if len(tier) else ""
        logger.info(
            "KV cache beyond the pool: %s blocks of %.2f MiB in CPU memory%s",
            f"{num_slots:,}",
            sum(kv.rank_bytes) / 2**20,
            found,
        )
        tiers.append(tier)
    if options.kv_offloading_path is not None:
        folder = Path(options.kv_offloading_path)
        limit = options.kv_offloading_disk_size
        tiers.append(DiskTier(len(tiers), partial(block_path, folder, 0, ranks)))
        logger.info(
            "KV cache beyond the pool: files in %s, %s",
            folder,
            "without a limit" if limit is None else f"at most {limit / 2**30:.2f} GiB",
        )
    return tiers
