"""Builds one rank's half of the tiers."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from quire.attention.base import CacheBackend
from quire.config.engine import ConfigError, EngineConfig
from quire.kv.specs import KVCacheSize
from quire.kv.tiers import MEMORY_VARIABLE, memory_slots
from quire.messages.errors import error_text
from quire.parallel.mesh import Mesh
from quire.worker.kv_memory import KVMemory
from quire.worker.kv_transfer import KVTransfers, MemoryStore, Store
from quire.worker.step_clock import StepClock

_PAGE_BYTES = 4096  # of memory, at least


def kv_transfers(
    config: EngineConfig,
    directory: Path,
    size: KVCacheSize,
    memory: KVMemory,
    backends: Sequence[CacheBackend],
    mesh: Mesh,
    clock: StepClock | None,
) -> KVTransfers | None:
    """Return the transfers between this rank's cache and the configured tiers, None if there are no tiers. The blocks
    of other engines are the last tier. clock: of this rank, if other engines read its blocks. Raises ConfigError."""
    options = config.cache
    rank = mesh.replica.rank
    ranks = mesh.replica.size
    stores: list[Store] = []
    if options.kv_offloading_bytes:
        num_slots = memory_slots(options.kv_offloading_bytes, size.rank_bytes)
        if not num_slots:
            raise ConfigError(
                f"kv_offloading_size={options.kv_offloading_size} GiB has no room for a block of "
                f"{sum(size.rank_bytes):,} bytes; raise it"
            )
        kept = os.environ.get(MEMORY_VARIABLE)
        store = MemoryStore(num_slots, size.rank_bytes, rank, Path(kept) if kept else None)
        if options.kv_cache_pretouch:
            store.slots[:, ::_PAGE_BYTES] |= 0  # another process may have filled them
        stores.append(store)
    if options.kv_offloading_path is not None:
        from quire.worker.disk_store import DiskStore, prepare_folder

        folder = Path(options.kv_offloading_path)
        first = mesh.machine is None or mesh.rank == min(mesh.machine)
        try:
            prepare_folder(folder)
            stores.append(
                DiskStore(
                    folder,
                    options.kv_offloading_disk_size,
                    size.rank_bytes[rank],
                    rank,
                    ranks,
                    mesh.ranks_on_machine,
                    deletes=first,
                )
            )
        except OSError as error:
            raise ConfigError(f"kv_offloading_path={options.kv_offloading_path!r}: {error_text(error)}") from error
    if (transfer := config.cache.transfer) is not None and size.specs:
        name = transfer.kv_connector_module_path + ".ranks"
        try:
            ranks_of_others = importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"kv_transfer_config: kv_connector_module_path: {name} cannot be imported: {error_text(error)}"
            ) from error
        stores.append(ranks_of_others.rank_store(config, directory, memory, size, backends, mesh, clock))
    if not stores:
        return None
    transfers = KVTransfers(memory.blocks, stores)
    if isinstance(stores[0], MemoryStore):
        transfers.rows.pin(stores[0].slots)
    return transfers
