"""The servers behind the proxy: which of them are healthy, how busy they are, and which one gets a request."""

import asyncio
from collections.abc import Collection, Sequence
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self

from quire.engine.router import Router
from quire.observability.logging import logger
from quire.router.call import Call, text_pieces
from quire.router.config import RouteConfig
from quire.router.metrics import BackendMetrics, RouteMetrics

if TYPE_CHECKING:
    from quire.router.prefix_index import CachedPrefixes


class Backend:
    """A server.

    unanswered: the visits of requests that it has not begun to answer. answering: the number of those that it is
    answering. elsewhere: the number of its requests that came another way, by its own count. sent: how many requests
    were sent since it joined.
    """

    def __init__(self, number: int, url: str, metrics: BackendMetrics) -> None:
        self.number = number
        self.url = url
        self.metrics = metrics
        self.healthy = False
        self.unanswered: set[Visit] = set()
        self.answering = self.elsewhere = self.sent = 0
        self.recheck = asyncio.Event()  # asks for a health check at once
        metrics.in_flight.set_function(lambda: self.in_flight)

    @property
    def in_flight(self) -> int:
        return len(self.unanswered) + self.answering

    def rank(self, session: bytes) -> bytes:
        """A session goes to the server with the highest rank (rendezvous hashing, Thaler and Ravishankar, 1998). So
        when a server is lost, only its own sessions move, and they return with it."""
        return blake2b(session, key=blake2b(self.url.encode(), digest_size=16).digest(), digest_size=8).digest()


class Policy(Protocol):
    """Which server gets a request. Servers have numbers. quire.engine.router.Router is one; what it is told about
    prefixes comes from the texts of requests, or from the servers' KV events."""

    def route(self, request: Call, ready: Sequence[int], core: int | None = None) -> int: ...
    def report(self, core: int, waiting: int, running: int, received: int) -> None: ...
    def forget(self, core: int) -> None: ...


class RoundRobin:
    """Servers take turns, however busy they are."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._next = 0

    def route(self, request: Call, ready: Sequence[int], core: int | None = None) -> int:
        if core is None:
            core = min(ready, key=lambda number: (number - self._next) % self._count)
            self._next = (core + 1) % self._count
        return core

    def report(self, core: int, waiting: int, running: int, received: int) -> None:
        pass

    def forget(self, core: int) -> None:
        pass


def _policy(config: RouteConfig, count: int, cached: "CachedPrefixes | None") -> Policy:
    if config.policy == "round-robin":
        return RoundRobin(count)
    if cached is not None:
        return Router(count, cached.pieces, prefixes=cached)
    return Router(count, text_pieces if config.policy in ("prefix", "cached") else None)


class Fleet:
    """All servers of a kind: those that answer requests ("backend"), or those that only compute prompts."""

    def __init__(
        self,
        config: RouteConfig,
        metrics: RouteMetrics,
        kind: Literal["backend", "prefill"] = "backend",
        cached: "CachedPrefixes | None" = None,
    ) -> None:
        """cached: what the servers have, if their KV events say so."""
        urls = config.backend if kind == "backend" else tuple(server.url for server in config.prefill_servers)
        self.backends = [Backend(i, url, metrics.of_backend(kind, url)) for i, url in enumerate(urls)]
        self._policy = _policy(config, len(urls), cached)
        self._max_connections = config.max_connections

    @property
    def healthy(self) -> list[Backend]:
        return [backend for backend in self.backends if backend.healthy]

    def others(self, avoided: Collection[Backend]) -> list[Backend]:
        """The healthy servers with a free connection, except those to be avoided."""
        return [b for b in self.healthy if b.in_flight < self._max_connections and b not in avoided]

    def choose(self, call: Call, avoided: Collection[Backend]) -> Backend | None:
        """The server for a request, or None. One to be avoided is chosen if there is no other."""
        ready = self.others(avoided) or self.others(())
        if not ready:
            return None
        wanted = None
        if (session := call.session) is not None:
            wanted = max(ready, key=lambda backend: backend.rank(session)).number
        return self.backends[self._policy.route(call, [backend.number for backend in ready], wanted)]

    def report(self, backend: Backend) -> None:
        """Tell the policy how busy a server is. Requests that it has not begun to answer count as waiting there."""
        received = backend.sent - len(backend.unanswered)
        self._policy.report(backend.number, 0, backend.answering + backend.elsewhere, received)

    def join(self, backend: Backend) -> None:
        """A server is healthy, so it gets requests from now on."""
        if not backend.healthy:
            backend.healthy = True
            backend.metrics.up.set(1)
            logger.info("%s is healthy: it gets requests", backend.url)

    def leave(self, backend: Backend, reason: str) -> None:
        """A server gets no requests from now on. Those that it has may go on: it may be draining."""
        if not backend.healthy:
            return
        backend.healthy = False
        backend.metrics.up.set(0)
        logger.warning("%s is not healthy and gets no requests: %s", backend.url, reason)
        self._policy.forget(backend.number)
        backend.sent = backend.elsewhere = 0
        self.report(backend)

    def give_up(self, backend: Backend) -> None:
        """A server is silent, so the requests that it has not begun to answer go to others."""
        for visit in backend.unanswered:
            visit.interrupt("lost")


class Visit:
    """A request at a server, from the choice to the end of the answer; a context manager.

    Raises TimeoutError in its context if it is interrupted before the server answers, for the reason `reason`.
    """

    def __init__(self, fleet: Fleet, backend: Backend) -> None:
        self._fleet = fleet
        self._backend = backend
        self._limit = asyncio.timeout(None)
        self._answered = False
        self.reason = ""

    async def __aenter__(self) -> Self:
        self._backend.sent += 1
        self._backend.unanswered.add(self)
        await self._limit.__aenter__()
        return self

    def answered(self) -> None:
        """The server has begun to answer."""
        self._answered = True
        self._backend.unanswered.discard(self)
        self._backend.answering += 1
        self._fleet.report(self._backend)
        if self.reason:  # it came too late
            self._limit.reschedule(None)

    def interrupt(self, reason: str) -> None:
        """End the visit, unless the server has begun to answer."""
        if self in self._backend.unanswered and not self.reason:
            self.reason = reason
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._backend.unanswered.discard(self)
        self._backend.answering -= self._answered
        self._fleet.report(self._backend)
        await self._limit.__aexit__(kind, error, trace)
