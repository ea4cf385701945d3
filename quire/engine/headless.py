"""`quire serve --headless`: the part of an engine on a machine without a server."""

import asyncio
import secrets
from pathlib import Path

import msgspec

from quire.cluster.addresses import own_address, resolve
from quire.cluster.messages import Join
from quire.cluster.node import Node
from quire.cluster.secret import ClusterSecret, tcp_address
from quire.config.engine import EngineConfig
from quire.engine.cores import Cores
from quire.engine.replica_group import Rendezvous
from quire.executor.agreement import facts, versions
from quire.messages.engine import Begin, CoreDied, CoreEvent, CoreUp, RendezvousPlace
from quire.messages.errors import error_text
from quire.observability.logging import logger
from quire.platform.termination import end_if_told, end_signals

_orders = msgspec.msgpack.Decoder(Begin)


def run_headless(config: EngineConfig, directory: Path) -> int:
    """Run this machine's part of the engine until a signal. Returns the exit status. Raises ConfigError.

    directory: the model's directory or GGUF file on this machine.
    """
    if config.layout.machine:
        from quire.executor.agent import run_agent  # imports torch, which the parent of cores does not need

        run_agent(config, directory)
        return 0
    assert config.cluster.cluster_secret_file is not None
    secret = ClusterSecret.read(config.cluster.cluster_secret_file)
    return asyncio.run(HeadlessCores(config, directory, secret).run())


class AnnouncedRendezvous(Rendezvous):
    """Replicas that share experts meet at the server's machine, which announces the generation to start."""

    def __init__(self, address: str, secret: bytes, host: str) -> None:
        self._address = address
        self._secret = secret
        self._host = host
        self.generation = -1  # of the latest processes
        self._announced = self._ended = -1
        self._news = asyncio.Event()

    def announce(self, generation: int) -> bool:
        """Set the generation. Returns whether replicas of another generation must end first."""
        is_new = generation != self._announced
        self._announced = generation
        self._news.set()
        return is_new and self.generation not in (-1, self._ended)

    def place(self, replica: int) -> tuple[RendezvousPlace, None]:
        self.generation = self._announced
        return RendezvousPlace(replica, self._address, self._host, self._secret, self.generation, is_head=True), None

    def end(self) -> None:
        self._ended = self.generation

    async def begin(self) -> None:
        while self._announced == self._ended:
            self._news.clear()
            await self._news.wait()


class HeadlessCores:
    """The cores of this machine, for the server on another one. When the session with the server ends, they keep
    running without requests, which the server sends elsewhere. Replicas that share experts start when the server
    announces it."""

    def __init__(self, config: EngineConfig, directory: Path, secret: ClusterSecret) -> None:
        """Raises ConfigError if the server cannot be reached, or if a core cannot be started."""
        options = config.cluster
        here = config.layout.here
        host = own_address(options.head_address)
        join = Join(
            first=here.start,
            count=len(here),
            node=secrets.randbits(62),
            host=host,
            facts=facts(config, directory),
            versions=versions(),
        )
        join_address = tcp_address(resolve(options.head_address), options.data_parallel_rpc_port)
        self._node = Node(secret, join_address, join)
        self._rendezvous: AnnouncedRendezvous | None = None
        if config.parallel.shares_experts:
            self._rendezvous = AnnouncedRendezvous(join_address, secret.secret, host)
        self._cores = Cores(config, directory, (host, secret.secret), self._rendezvous)
        self._up: dict[int, CoreUp] = {}
        self._loop: asyncio.AbstractEventLoop

    async def run(self) -> int:
        """Run until a signal, or until all cores are given up. Returns the exit status. Raises ConfigError if the
        server rejects this machine."""
        self._loop = asyncio.get_running_loop()
        for number in end_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._node.stop)
        end_if_told()
        cores = asyncio.create_task(self._cores.run(self._told))
        node = asyncio.create_task(asyncio.to_thread(self._node.run, self))
        try:
            await asyncio.wait([cores, node], return_when=asyncio.FIRST_COMPLETED)
            status = int(cores.done())
            if status:
                logger.error("All cores of this machine have failed for good")
            self._node.stop()
            await node
            return status
        finally:
            cores.cancel()
            await asyncio.gather(cores, return_exceptions=True)
            self._cores.kill()

    def _told(self, event: CoreEvent) -> None:
        if isinstance(event, CoreUp):
            self._up[event.rank] = event
        else:
            self._up.pop(event.rank, None)
        if self._rendezvous is not None:
            event.generation = self._rendezvous.generation
        self._node.send(msgspec.msgpack.encode(event))

    # ---- in a session with the server, on the node's thread

    def begin(self, body: bytes) -> None:
        for event in list(self._up.values()):
            self._node.send(msgspec.msgpack.encode(event))

    def received(self, body: bytes) -> None:
        """Handle an order to replicas that share experts. All other orders reach the cores from the server's
        clients."""
        try:
            generation = _orders.decode(body).generation
        except msgspec.DecodeError as error:
            logger.warning("The server sent an order of %d bytes that has no meaning: %s", len(body), error_text(error))
            return
        self._loop.call_soon_threadsafe(self._begin, generation)

    def _begin(self, generation: int) -> None:
        replica_group = self._cores.replica_group
        if self._rendezvous is None or replica_group is None or not self._rendezvous.announce(generation):
            return
        replica_group.lose(
            replica_group.here.start, CoreDied("the replicas begin again", silent=True), False, self._told
        )

    def end(self) -> None:
        """Do nothing: the cores end requests when they detect that their clients have disconnected."""
