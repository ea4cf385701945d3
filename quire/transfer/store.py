"""The cache tier that consists of other engines: it loads blocks from their ranks."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import cache, partial
from itertools import chain

import numpy as np

from quire.cluster.secret import ClusterSecret
from quire.messages.errors import error_text
from quire.messages.transfers import Peer, Transfer
from quire.observability.logging import logger
from quire.transfer import wire
from quire.transfer.layout import ALL_LAYERS, Plan, RankLayout, Run, plan
from quire.transfer.messages import Hello
from quire.transfer.nixl_reads import NixlMemory, NixlSource
from quire.transfer.server import BlockServer, block_buffer
from quire.transfer.sources import Blocks, MappedSource, Pairs, Source, TcpSource
from quire.worker.kv_transfer import HostRows, Rows, Store
from quire.worker.step_clock import NOT_RUN

IDLE_SECONDS = 60.0
TRANSPORTS = ("shared_memory", "nixl", "tcp")  # in the order in which they are tried
_REST_SECONDS = 2.0  # between two attempts to connect
_PARTS = 8  # of the layers; each part is read once it has been computed
_STILL_SECONDS = 20.0  # after this time, loads from a rank without progress fail
_THREADS = 16  # that read from all peers


class PeerStore(Store):
    """Reads blocks of other engines: each order names the engine and the blocks. The store connects to the ranks of a
    peer on first use, and closes connections that have been idle for a while."""

    load_threads = 16  # most of them wait for steps of peers

    def __init__(
        self,
        layout: RankLayout,
        rank: int,
        secret: ClusterSecret,
        *,
        transports: Sequence[str] = (),
        streams: int = 2,
        nixl: NixlMemory | None = None,
        server: BlockServer | None = None,
        timeout: float = wire.TIMEOUT_SECONDS,
        idle: float = IDLE_SECONDS,
    ) -> None:
        """layout, rank: this rank's. streams: the number of connections to each rank. server: closed together with this
        store."""
        self._layout = layout
        self._rank = rank
        self._secret = secret
        self._streams = streams
        self._transports = tuple(transports) or TRANSPORTS
        self._nixl = nixl
        self.server = server
        self._timeout = timeout
        self._idle = idle
        self._links: dict[Peer, _Link] = {}
        self._lock = threading.Lock()  # guards the links' users
        self._parts = layout.parts(_PARTS)
        self._threads = ThreadPoolExecutor(_THREADS, "quire-kv-read")
        self._closed = threading.Event()
        threading.Thread(target=self._close_idle, name="quire-kv-idle", daemon=True).start()

    def save(self, rows: Rows, order: Transfer) -> list[int]:
        """Copy nothing: other engines read the blocks by themselves."""
        return list(range(len(order.keys)))

    def load(self, rows: Rows, order: Transfer) -> list[int]:
        peer = order.peer
        assert peer is not None
        with self._lock:
            link = self._links.setdefault(peer, _Link())
            link.users += 1
        try:
            with link.lock:
                if time.monotonic() >= link.rest_until and not self._closed.is_set():
                    return self._load(link, peer, rows, order)
        except Exception as error:
            logger.warning(
                "KV blocks of the engine at %s, ports %s, cannot be read, and are computed: %s",
                peer.host,
                ", ".join(map(str, peer.ports)),
                error_text(error),
            )
        finally:
            with self._lock:
                link.users -= 1
                link.used_at = time.monotonic()
        return list(range(len(order.keys)))

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        if self.server is not None:
            self.server.close()
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.interrupt()
        for link in links:
            with link.lock:
                link.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._nixl is not None:
            self._nixl.close()

    def _load(self, link: "_Link", peer: Peer, rows: Rows, order: Transfer) -> list[int]:
        """Return the indices of the blocks that could not be loaded. Closes the link before it raises an error."""
        try:
            if not link.sources:
                self._open(link, peer)
            return [] if self._read(link, rows, order) else list(range(len(order.keys)))
        except BaseException:
            link.close()
            raise

    def _open(self, link: "_Link", peer: Peer) -> None:
        """Connect to the ranks of the peer that have this rank's layers and heads."""
        try:
            self._connect(link, peer)
        except (wire.WrongSecretError, ValueError):
            link.rest_until = float("inf")  # a new attempt would fail in the same way
            raise
        except OSError:
            link.rest_until = time.monotonic() + _REST_SECONDS  # loads that wait for the lock skip their attempt
            raise

    def _connect(self, link: "_Link", peer: Peer) -> None:
        with contextlib.ExitStack() as unused:
            hellos = list[Hello]()
            asked = list[TcpSource]()
            for port in peer.ports:
                asked.append(TcpSource(peer.host, port, self._secret, self._timeout))
                unused.callback(asked[-1].close)
                hellos.append(asked[-1].hello())
                if hellos[-1].name != peer.name:
                    raise ConnectionError(f"another engine listens on port {port}; the one that was asked has ended")
            link.plan = cache(partial(plan, self._layout, [hello.layout for hello in hellos], self._rank))
            needed = link.ranks(ALL_LAYERS)
            reasons = []
            for transport in self._transports:
                try:
                    for number in sorted(needed):
                        link.sources[number] = self._sources(transport, peer, number, hellos[number])
                except OSError as error:
                    link.close()
                    reasons.append(f"{transport}: {error_text(error)}")
                else:
                    link.reads_into_rows = transport == "nixl"
                    link.clocks = {number: asked[number] for number in needed}
                    for number, source in enumerate(asked):
                        if number not in needed:
                            source.close()
                    unused.pop_all()
                    logger.info("KV blocks of the engine at %s are read by %s", peer.host, transport)
                    return
            raise ConnectionError("; ".join(reasons))

    def _sources(self, transport: str, peer: Peer, number: int, hello: Hello) -> list[Source]:
        """Open the sources for one rank of the peer, one for each reading thread. Raises OSError."""
        if transport == "shared_memory":
            return [MappedSource(hello)]
        if transport == "nixl":
            if self._nixl is None:
                raise ConnectionError("this rank has no NIXL")
            return [NixlSource(self._nixl, hello, self._timeout)]
        sources: list[Source] = []
        try:
            for _ in range(self._streams):
                sources.append(TcpSource(peer.host, peer.ports[number], self._secret, self._timeout))
        except OSError:
            for source in sources:
                source.close()
            raise
        return sources

    def _read(self, link: "_Link", rows: Rows, order: Transfer) -> bool:
        """Read each part of the layers as soon as it is computed. Returns False if the step was not run."""
        parts = self._parts
        reached = dict[int, int]()
        while parts:
            for number in link.ranks(parts[0]):
                if order.step and reached.get(number, 0) < parts[0].stop:
                    reached[number] = link.wait(number, order.step, parts[0].stop)
                    if reached[number] == NOT_RUN:
                        return False
            behind = (
                any(order.step and reached.get(number, 0) < part.stop for number in link.ranks(part)) for part in parts
            )
            count = next((place for place, is_behind in enumerate(behind) if is_behind), len(parts))
            self._read_layers(link, rows, order, range(parts[0].start, parts[count - 1].stop))
            parts = parts[count:]
        return True

    def _read_layers(self, link: "_Link", rows: Rows, order: Transfer, layers: range) -> None:
        plan = link.plan(layers)
        fills_rows = isinstance(rows, HostRows) and rows.are_adjacent
        if fills_rows or link.reads_into_rows:
            blocks = rows.blocks.numpy() if fills_rows else np.empty((0, 0), np.uint8)
            self._fill(link, plan, order, range(len(order.keys)), order.block_ids, blocks)
            return
        # The parts of a block may come from several ranks, so whole blocks are assembled in CPU memory.
        buffer = block_buffer(rows, len(order.keys))
        for start in range(0, len(order.keys), len(buffer)):
            indices = range(start, min(start + len(buffer), len(order.keys)))
            self._fill(link, plan, order, indices, range(len(indices)), buffer.numpy())
            for group in range(len(plan)):
                places = [place for place, index in enumerate(indices) if order.keys[index][0] == group]
                ids = [order.block_ids[start + place] for place in places]
                rows.write(ids, [buffer[place] for place in places], self._layout.span(group, layers))

    def _fill(
        self, link: "_Link", plan: Plan, order: Transfer, indices: range, targets: Sequence[int], blocks: Blocks
    ) -> None:
        """Read the order's blocks at `indices`, with one thread per source. Returns when all threads have finished."""
        work = _shares(link, plan, order, indices, targets)

        def read(source: Source) -> None:
            for pairs, runs in work[source]:
                source.read(pairs, runs, blocks)

        if len(work) == 1:
            read(*work)
            return
        reads = [self._threads.submit(read, source) for source in work]
        ended = wait(reads, return_when=FIRST_EXCEPTION).done
        problem = next((error for future in ended if (error := future.exception()) is not None), None)
        if problem is not None:
            link.interrupt()
        wait(reads)  # nothing may be written once this has returned
        if problem is not None:
            raise problem

    def _close_idle(self) -> None:
        while not self._closed.wait(self._idle / 4):
            with self._lock:
                for peer in [peer for peer, link in self._links.items() if link.is_idle(self._idle)]:
                    self._links.pop(peer).close()


class _Link:
    """This rank's connections to one peer. lock: held by the thread that uses the sources. users: the number of threads
    that use the link or wait for it. rest_until: the earliest time of the next attempt after a failed one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.used_at = time.monotonic()
        self.rest_until = 0.0
        self.reads_into_rows = False
        self.plan: Callable[[range], Plan] = lambda layers: ()
        self.sources: dict[int, list[Source]] = {}  # by the number of the peer's rank
        self.clocks: dict[int, TcpSource] = {}  # by the number of the peer's rank

    def is_idle(self, seconds: float) -> bool:
        return not self.users and time.monotonic() > self.used_at + seconds

    def ranks(self, layers: range) -> set[int]:
        """Return the numbers of the peer's ranks from which these layers are read."""
        return {number for group in self.plan(layers) for number in group}

    def wait(self, number: int, step: int, layer: int) -> int:
        """Wait until a rank has computed its layers below `layer` of a step. Returns the layer it has reached (see
        StepClock). Raises OSError or ValueError."""
        ticks = -1
        since = time.monotonic()
        while True:
            reached = self.clocks[number].wait(step, layer)
            if reached.layer == NOT_RUN or reached.layer >= layer:
                return reached.layer
            if reached.ticks != ticks:
                ticks = reached.ticks
                since = time.monotonic()
            elif time.monotonic() - since > _STILL_SECONDS:
                raise TimeoutError("a step has not been run for too long")

    def interrupt(self) -> None:
        for source in self._all():
            source.interrupt()

    def close(self) -> None:
        for source in self._all():
            with contextlib.suppress(OSError):
                source.close()
        self.sources = {}
        self.clocks = {}

    def _all(self) -> Iterator[Source]:
        return chain(*list(self.sources.values()), list(self.clocks.values()))


def _shares(
    link: _Link, plan: Plan, order: Transfer, indices: range, targets: Sequence[int]
) -> dict[Source, list[tuple[Pairs, list[Run]]]]:
    """Return the reads of each source. If a rank has several sources, each gets an equal share of the blocks."""
    by_group: dict[int, list[tuple[int, int]]] = {}
    for index, target in zip(indices, targets, strict=True):
        by_group.setdefault(order.keys[index][0], []).append((order.slots[index], target))
    shares: dict[Source, list[tuple[Pairs, list[Run]]]] = {}
    for group, pairs in by_group.items():
        for number, runs in plan[group].items():
            sources = link.sources[number]
            for place, source in enumerate(sources):
                if part := pairs[place :: len(sources)]:
                    shares.setdefault(source, []).append((part, runs))
    return shares
