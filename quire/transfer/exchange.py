"""The scheduler's half of the connector: it imports blocks from other engines and exports blocks to them."""

import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from quire.checkpoints.metadata import hf_config
from quire.cluster.secret import NoSecret, transfer_secret
from quire.config.engine import EngineConfig
from quire.executor.agreement import weights_digest
from quire.kv.manager import Holder, KVCacheManager
from quire.kv.specs import KVCacheSize
from quire.kv.transfers import Mover
from quire.messages.engine import EngineCoreRequest
from quire.messages.transfers import Peer
from quire.observability.logging import logger
from quire.transfer.core_messages import PROTOCOL
from quire.transfer.exports import Exports
from quire.transfer.imports import Imports
from quire.transfer.link import Confirmed, Link, Told
from quire.transfer.sources import ask

_LOOK_SECONDS = 0.5  # between two checks for expired waits
_END_SECONDS = 10.0  # how long consumers may take to finish before the engine sleeps


class Exchange:
    """A Connector (quire/scheduler/gate.py). A consumer's request passes the gate when all blocks that can be read are
    in the pool; the engine computes the missing ones."""

    def __init__(
        self,
        kv: KVCacheManager,
        mover: Mover,
        tier: int,
        link: Link,
        facts: dict[str, str],
        peer: Peer,
        replicas: Sequence[int] = (),
    ) -> None:
        """tier: the index of the workers' store for blocks of other engines. peer: tells other engines where to read
        this engine's blocks. replicas: the ports of all replicas of this engine; only those of others matter."""
        self._imports = Imports(kv, mover, tier, link, facts)
        self._exports = Exports(kv, link, facts, peer, replicas)
        self._link = link
        self._look_at = 0.0
        link.start(self._exports.hear)

    @property
    def num_queries(self) -> int:
        return self._imports.num_queries

    @property
    def num_hits(self) -> int:
        return self._imports.num_hits

    def connect(self, wake: Callable[[], None]) -> None:
        self._link.wake = wake

    def ready(self, request: EngineCoreRequest) -> bool:
        if (params := request.transfer) is None:
            return True
        if params.do_remote_decode:
            self._exports.add(request)
        return not params.do_remote_prefill or not request.reads_prefix_cache or self._imports.ready(request)

    def scheduled(self, step_id: int, requests: Sequence[Holder]) -> None:
        self._imports.scheduled(requests)
        self._exports.scheduled(step_id, requests)

    def withdrawn(self, step_id: int) -> None:
        self._exports.withdrawn(step_id)

    def retired(self, step_id: int) -> None:
        self._exports.retired(step_id)

    def finish(self, request: EngineCoreRequest) -> None:
        if request.transfer is not None:
            self._imports.finish(request.request_id)
            self._exports.finish(request.request_id)

    def settle(self) -> bool:
        if time.monotonic() >= self._look_at:
            self.check_time()
        events = self._link.events
        while events:
            event = events.popleft()
            if isinstance(event, Told):
                self._imports.told(event)
            elif isinstance(event, Confirmed):
                self._imports.confirmed(event)
            else:
                self._imports.lost(event)
        self._imports.settle()
        self._exports.settle()
        has_changed = self._imports.has_changed or self._exports.has_changed
        self._imports.has_changed = self._exports.has_changed = False
        return has_changed

    def check_time(self) -> None:
        now = time.monotonic()
        self._look_at = now + _LOOK_SECONDS
        self._imports.check_time(now)
        self._exports.check_time(now)
        if self._imports.has_changed or self._exports.has_changed:
            self._link.wake()

    def finish_all(self, wait: Callable[[float], bool]) -> None:
        late_at = time.monotonic() + _END_SECONDS
        self._imports.drop_all()
        self._exports.drop_unwanted()
        while not (self._imports.is_idle and self._exports.is_idle):
            if time.monotonic() > late_at:
                raise ValueError("other engines still read the KV blocks of this one; try again later")
            wait(0.1)
            self.settle()

    def close(self) -> None:
        self._link.close()


def make_connector(
    config: EngineConfig, directory: Path, size: KVCacheSize, kv: KVCacheManager, mover: Mover, tier: int, replica: int
) -> Exchange:
    """Return the connector that the options describe. directory: the model's. tier: see Exchange. replica: the number
    of this one among those of its server, see EngineConfig.at_replica. Raises ConfigError."""
    options = config.cache.transfer
    assert options is not None
    secret = transfer_secret(config)
    if isinstance(secret, NoSecret):
        logger.warning(
            "insecure_transfers: every engine in a private network may exchange KV blocks with this one, without "
            "proving who it is. Use cluster_secret_file if you do not trust everyone there"
        )
    host = options.kv_ip
    stride = config.transfer_ports
    base = options.kv_port - replica * stride
    replicas = range(base, base + len(config.layout.here) * stride, stride)
    first = options.kv_port + 1
    ports = tuple(range(first, first + config.parallel.ranks))
    if options.produces:
        peer = Peer(ask(host, first, secret).name, host, ports)  # its ranks listen already
        link = Link(secret, (host, options.kv_port))
        logger.info("KV blocks of prompts can be read at %s:%d", host, options.kv_port)
    else:
        peer = Peer("", host, ())
        link = Link(secret, None)
    return Exchange(kv, mover, tier, link, facts(config, directory, size), peer, replicas)


def facts(config: EngineConfig, directory: Path, size: KVCacheSize) -> dict[str, str]:
    """Return the properties that must be the same in both engines, by name."""
    fields: dict[str, Any] = hf_config(directory, config.model.hf_overrides)
    text = msgspec.json.encode(fields, order="deterministic")
    return {
        "the protocol": str(PROTOCOL),
        "the model's config.json": sha256(text).hexdigest()[:16],
        "the model's weights": "none" if config.model.load_format == "dummy" else weights_digest(directory),
        "quantization": str(config.model.quantization),
        "block_size": str(size.block_size),
        "the layout of the KV cache": size.layout,
    }
