"""The tier that consists of other engines: it loads blocks that their ranks have."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import numpy as np

from quire.messages.errors import error_text
from quire.messages.transfers import Peer, Transfer
from quire.metrics.logging import logger
from quire.worker.kv_transfer import HostRows, Rows, Store
from quire_transfer import wire
from quire_transfer.layout import Plan, RankLayout, Run, plan
from quire_transfer.messages import Hello
from quire_transfer.nixl_reads import NixlMemory, NixlSource
from quire_transfer.server import BlockServer, block_buffer
from quire_transfer.sources import Blocks, MappedSource, Pairs, Source, TcpSource

IDLE_SECONDS = 60.0
TRANSPORTS = ("shared_memory", "nixl", "tcp")  # in the order in which they are tried
_REST_SECONDS = 2.0
_THREADS = 16  # that read, for all peers


class PeerStore(Store):
    """Reads blocks of other engines. The order says whose, and which. It connects to the ranks of a peer when it is
    asked for their blocks, and keeps the connections until they have not been used for a while."""

    load_threads = 4  # so that a peer which does not answer delays few others

    def __init__(
        self, layout: RankLayout, rank: int, secret: bytes, *, transports: Sequence[str] = (), streams: int = 2,
        nixl: NixlMemory | None = None, server: BlockServer | None = None, timeout: float = wire.TIMEOUT_SECONDS,
        idle: float = IDLE_SECONDS,
    ) -> None:  # fmt: skip
        """layout, rank: of this rank. streams: connections to each rank. server: closed with this store."""
        self._layout, self._rank, self._secret, self._streams = layout, rank, secret, streams
        self._transports, self._nixl, self.server = tuple(transports) or TRANSPORTS, nixl, server
        self._timeout, self._idle = timeout, idle
        self._links: dict[Peer, _Link] = {}
        self._lock = threading.Lock()  # guards the links' users
        self._threads = ThreadPoolExecutor(_THREADS, "quire-kv-read")
        self._closed = threading.Event()
        threading.Thread(target=self._close_idle, name="quire-kv-idle", daemon=True).start()

    def save(self, rows: Rows, order: Transfer) -> list[int]:
        """Wait until the steps have been run that were submitted before: now other engines may read the blocks."""
        rows.read([], [])
        return []

    def load(self, rows: Rows, order: Transfer) -> list[int]:
        peer = order.peer
        assert peer is not None
        with self._lock:
            link = self._links.setdefault(peer, _Link())
            link.users += 1
        try:
            with link.lock:
                if time.monotonic() >= link.rest_until and not self._closed.is_set():
                    self._load(link, peer, rows, order)
                    return []
        except Exception as error:
            logger.warning("KV blocks of the engine at %s, ports %s, cannot be read, and are computed: %s", peer.host,
                           ", ".join(map(str, peer.ports)), error_text(error))  # fmt: skip
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

    def _load(self, link: "_Link", peer: Peer, rows: Rows, order: Transfer) -> None:
        """Raises what has gone wrong; then the link is closed."""
        try:
            if not link.sources:
                self._open(link, peer)
            self._read(link, rows, order)
        except BaseException:
            link.close()
            raise

    def _open(self, link: "_Link", peer: Peer) -> None:
        """Connect to the ranks of the peer that have what this rank needs."""
        try:
            self._connect(link, peer)
        except (wire.WrongSecretError, ValueError):
            link.rest_until = float("inf")  # a new attempt would end in the same way
            raise
        except OSError:
            link.rest_until = time.monotonic() + _REST_SECONDS  # loads that wait for this one need not try, too
            raise

    def _connect(self, link: "_Link", peer: Peer) -> None:
        with contextlib.ExitStack() as unused:
            hellos = []
            for port in peer.ports:
                source = TcpSource(peer.host, port, self._secret, self._timeout)
                unused.callback(source.close)
                hellos.append(source.hello())
                if hellos[-1].name != peer.name:
                    raise ConnectionError(f"another engine listens on port {port}; the one that was asked has ended")
            link.plan = plan(self._layout, [hello.layout for hello in hellos], self._rank)
            needed = {number for group in link.plan for number in group}
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
                    logger.info("KV blocks of the engine at %s are read by %s", peer.host, transport)
                    return
            raise ConnectionError("; ".join(reasons))

    def _sources(self, transport: str, peer: Peer, number: int, hello: Hello) -> list[Source]:
        """The ways to read from one rank of the peer, for as many threads. Raises OSError."""
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

    def _read(self, link: "_Link", rows: Rows, order: Transfer) -> None:
        if isinstance(rows, HostRows) or link.reads_into_rows:
            blocks = rows.blocks.numpy() if isinstance(rows, HostRows) else np.empty((0, 0), np.uint8)
            self._fill(link, order, range(len(order.keys)), order.block_ids, blocks)
            return
        # The parts of a block may come from several ranks, so whole blocks are put together in CPU memory.
        buffer = block_buffer(rows.blocks, len(order.keys))
        for start in range(0, len(order.keys), len(buffer)):
            indices = range(start, min(start + len(buffer), len(order.keys)))
            self._fill(link, order, indices, range(len(indices)), buffer.numpy())
            rows.write([order.block_ids[i] for i in indices], list(buffer[: len(indices)]))

    def _fill(self, link: "_Link", order: Transfer, indices: range, targets: Sequence[int], blocks: Blocks) -> None:
        """Read these of the order's blocks, on as many threads as there are sources. Returns when all have ended."""
        by_group: dict[int, list[tuple[int, int]]] = {}
        for index, target in zip(indices, targets, strict=True):
            by_group.setdefault(order.keys[index][0], []).append((order.slots[index], target))
        work: dict[Source, list[tuple[Pairs, list[Run]]]] = {}
        for group, pairs in by_group.items():
            for number, runs in link.plan[group].items():
                sources = link.sources[number]
                for place, source in enumerate(sources):
                    if part := pairs[place :: len(sources)]:
                        work.setdefault(source, []).append((part, runs))

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
    """What connects this rank with one peer. The lock is held by the thread that uses the sources. users: threads that
    use it or wait for it. rest_until: when to connect again, after that has failed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users, self.used_at = 0, time.monotonic()
        self.rest_until, self.reads_into_rows = 0.0, False
        self.plan: Plan = ()
        self.sources: dict[int, list[Source]] = {}  # by the number of the peer's rank

    def is_idle(self, seconds: float) -> bool:
        return not self.users and time.monotonic() > self.used_at + seconds

    def interrupt(self) -> None:
        for source in self._all():
            source.interrupt()

    def close(self) -> None:
        for source in self._all():
            with contextlib.suppress(OSError):
                source.close()
        self.sources = {}

    def _all(self) -> Iterator[Source]:
        return (source for sources in list(self.sources.values()) for source in sources)
