"""The cores of other machines: their `quire serve --headless` joins here, and reports the events of its cores."""

import asyncio
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from quire.cluster.addresses import own_address, resolve
from quire.cluster.head import Head, named
from quire.cluster.secret import ClusterSecret
from quire.config.engine import ConfigError, EngineConfig
from quire.engine.ray_cores import RayReplicas
from quire.engine.replica_group import Rendezvous, ReplicaGroup
from quire.executor.agreement import facts, versions
from quire.messages.engine import Begin, CoreDied, CoreEvent, CoreLost, CoreUp, RendezvousPlace
from quire.messages.errors import error_text
from quire.observability.logging import logger

JOIN_SECONDS = 600.0  # a core whose machine is missing for this long is given up until the machine joins
_events = msgspec.msgpack.Decoder(CoreEvent)


class RemoteCores(Rendezvous):
    """Listens for headless machines, and forwards their reports. When a machine is lost, its cores are lost; when it
    joins again, its cores are available again.

    Replicas that share experts meet at the head's store. The head announces to all machines which generation to start.
    """

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        """Raises ConfigError if it cannot listen, or has no secret."""
        options = config.cluster
        path = options.cluster_secret_file
        self._secret = ClusterSecret.random() if path is None else ClusterSecret.read(path)
        self._ranks = config.layout.elsewhere
        self._ray: RayReplicas | None = None
        host = options.head_address
        port = options.data_parallel_rpc_port
        if options.data_parallel_backend == "ray":
            self._ray = RayReplicas(config, self._ranks, self._secret)
            host = options.data_parallel_address or self._ray.host
            port = 0
        try:
            self._head = Head(
                self._secret, resolve(host), port, self._ranks, "replica", facts(config, directory), versions()
            )
        except ConfigError:
            self._close_ray()
            raise
        self._host = own_address(host)
        self._replica_group: ReplicaGroup | None
        self._generation = secrets.randbits(40) if config.parallel.shares_experts else 0  # differs between servers
        self._joined_members: set[range] = set()
        self._absent_since = dict.fromkeys(self._ranks, time.monotonic())
        self._up: dict[int, str] = {}  # addresses of the running cores
        self._given_up: set[int] = set()
        self._tell: Callable[[CoreEvent], None]
        self._loop: asyncio.AbstractEventLoop

    async def run(self, tell: Callable[[CoreEvent], None], replica_group: ReplicaGroup | None = None) -> None:
        """Run until cancelled. tell: called with each event. replica_group: the replicas of this machine, if they share
        experts with these."""
        self._replica_group = replica_group
        self._loop = asyncio.get_running_loop()
        self._tell = tell
        self._head.start(self)
        logger.info("Waiting for %s to join at %s", named("replica", self._ranks), self._head.address)
        if self._ray is not None:
            self._ray.start(int(self._head.address.rsplit(":", 1)[1]))
        try:
            while True:
                await asyncio.sleep(1)
                for rank, reason in () if self._ray is None else self._ray.refused():
                    self._lose(rank, CoreDied(reason, by_user=True), given_up=True)
                for rank, since in self._absent_since.items():
                    if rank not in self._given_up and time.monotonic() - since > JOIN_SECONDS:
                        reason = f"no machine with replica {rank} has joined at {self._head.address}"
                        self._lose(rank, CoreDied(f"{reason} for {JOIN_SECONDS:.0f} s"), given_up=True)
        finally:
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        self._head.close()
        self._close_ray()

    def _close_ray(self) -> None:
        if self._ray is not None:
            self._ray.close()
            self._ray = None

    # ---- on the head's thread

    def joined(self, members: range, host: str) -> bytes:
        self._loop.call_soon_threadsafe(self._joined, members)
        return b""

    def received(self, members: range, body: bytes) -> None:
        try:
            event = _events.decode(body)
        except msgspec.DecodeError as error:
            logger.warning(
                "The machine with %s sent a message of %d bytes that has no meaning: %s",
                named("replica", members),
                len(body),
                error_text(error),
            )
            return
        if event.rank in members:
            self._loop.call_soon_threadsafe(self._received, event)

    def lost(self, members: range, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._lost, members, reason)

    # ---- in the event loop

    def _joined(self, members: range) -> None:
        self._joined_members.add(members)
        self._announce(members)
        for rank in members:
            self._absent_since.pop(rank, None)
            self._given_up.discard(rank)

    def _announce(self, members: range) -> None:
        if self._replica_group is not None:
            self._head.send(members, msgspec.msgpack.encode(Begin(self._generation)))

    def _received(self, event: CoreEvent) -> None:
        if event.generation != self._generation or (
            self._replica_group is not None and self._replica_group.lost is not None
        ):
            return  # from replicas that are about to end
        if isinstance(event, CoreLost):
            self._lose(event.rank, event.died, event.given_up)
        elif self._up.get(event.rank) != event.address:
            self._up[event.rank] = event.address
            self._given_up.discard(event.rank)
            self._tell(CoreUp(event.rank, event.address, event.size, self._secret.secret))

    def _lost(self, members: range, reason: str) -> None:
        logger.error("The server has lost %s: %s", named("replica", members), reason)
        self._joined_members.discard(members)
        for rank in members:
            self._absent_since[rank] = time.monotonic()
            if rank not in self._given_up:
                self._lose(rank, CoreDied(reason, silent=True), given_up=False)

    def _lose(self, rank: int, died: CoreDied, given_up: bool) -> None:
        self._up.pop(rank, None)
        if given_up:
            self._given_up.add(rank)
        if self._replica_group is None:
            self._tell(CoreLost(rank, died, given_up))
        else:
            self._replica_group.lose(rank, died, given_up, self._tell)

    # ---- the rendezvous of replicas that share experts

    def place(self, replica: int) -> tuple[RendezvousPlace, None]:
        return RendezvousPlace(
            replica, self._head.address, self._host, self._secret.secret, self._generation, is_head=True
        ), None

    def end(self) -> None:
        self._generation += 1
        self._up.clear()
        for members in self._joined_members:
            self._announce(members)

    async def begin(self) -> None:
        """Return at once: the place is known."""
