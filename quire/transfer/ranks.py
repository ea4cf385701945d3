"""Creates one rank's store for blocks of other engines, and its server for readers of other engines."""

import secrets
from collections.abc import Sequence
from pathlib import Path

from quire.attention.base import AttentionBackend
from quire.cluster.secret import transfer_secret
from quire.config.engine import ConfigError, EngineConfig
from quire.config.kv_transfer import CONNECTORS
from quire.kv.specs import KVCacheSize
from quire.messages.errors import error_text
from quire.models.description import describe
from quire.parallel.mesh import Mesh
from quire.transfer.layout import rank_layout
from quire.transfer.nixl_reads import NixlMemory
from quire.transfer.server import BlockServer
from quire.transfer.store import TRANSPORTS, PeerStore
from quire.worker.kv_memory import KVMemory
from quire.worker.kv_transfer import Rows
from quire.worker.step_clock import StepClock


def rank_store(
    config: EngineConfig,
    directory: Path,
    memory: KVMemory,
    size: KVCacheSize,
    backends: Sequence[AttentionBackend],
    mesh: Mesh,
    clock: StepClock | None = None,
) -> PeerStore:
    """Return the store that reads blocks of other engines. If this engine is a producer, the store also has a server,
    which lets other engines read this rank's blocks until the store is closed. clock: the producer rank's. All ranks
    must call this together. Raises ConfigError."""
    options = config.cache.transfer
    rank = mesh.replica.rank
    assert options is not None
    secret = transfer_secret(config)
    transports = CONNECTORS[options.kv_connector] or TRANSPORTS
    is_divided = config.cache.kv_cache_layout == "layer_by_layer"
    nixl = NixlMemory.make(memory.blocks) if "nixl" in transports and not is_divided else None
    if transports == ("nixl",) and nixl is None:
        raise ConfigError(
            f"kv_transfer_config: kv_connector={options.kv_connector!r} needs NIXL, which is not "
            "installed or cannot be used here: pip install nixl, or use QuireConnector"
        )
    mixers = describe(directory, config.model).spec.mixers
    layout = rank_layout(mixers, mesh.tp, size.specs, backends, size.rank_bytes[mesh.replica.rank])
    name = f"{mesh.replica.minimum(secrets.randbits(62)):016x}"  # the same on all ranks
    server = None
    if options.produces:
        port = options.kv_port + 1 + rank
        try:
            server = BlockServer(
                Rows.of(memory.blocks),
                layout,
                secret,
                options.kv_ip,
                port,
                name=name,
                handle=memory.handle,
                nixl=None if nixl is None else nixl.describe(),
                clock=clock,
            )
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"kv_transfer_config: rank {rank} cannot listen at kv_ip={options.kv_ip}, port {port} "
                f"(kv_port + 1 + {rank}): {error_text(error)}"
            ) from error
    return PeerStore(
        layout, rank, secret, transports=transports, streams=options.extra.streams, nixl=nixl, server=server
    )
