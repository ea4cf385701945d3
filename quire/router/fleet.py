"""The servers behind the proxy: their health, their load, and the choice of a server for a request."""

import asyncio
from collections.abc import Collection, Sequence
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from quire.engine.router import Router
from quire.observability.logging import logger
from quire.router.call import Call, text_pieces
from quire.router.config import RouteConfig
from quire.router.metrics import BackendMetrics, RouteMetrics

if TYPE_CHECKING:
    from quire.router.prefix_index import CachedPrefixes


class Backend:
    """A server.

    unanswered: the visits whose response has not started. answering: the number of responses in progress. elsewhere:
    the number of its requests that did not come from this proxy, as reported by the server. sent: requests sent since
    it joined. models: the entries of its /v1/models by id; empty if they are not asked for.
    """

    def __init__(self, number: int, url: str, metrics: BackendMetrics) -> None:
        self.number = number
        self.url = url
        self.metrics = metrics
        self.healthy = False
        self.unanswered: set[Visit] = set()
        self.answering = self.elsewhere = self.sent = 0
        self.models: dict[str, Any] = {}
        self.recheck = asyncio.Event()  # triggers a health check at once
        metrics.in_flight.set_function(lambda: self.in_flight)

    @property
    def in_flight(self) -> int:
        return len(self.unanswered) + self.answering

    def rank(self, session: bytes) -> bytes:
        """Return the server's rank for a session, which goes to the server with the highest rank (rendezvous hashing,
        Thaler and Ravishankar, 1998). When a server is lost, only its sessions move, and they return with it."""
        return blake2b(session, key=blake2b(self.url.encode(), digest_size=16).digest(), digest_size=8).digest()


class Policy(Protocol):
    """Chooses the server for a request. Servers are identified by numbers. quire.engine.router.Router is a policy; its
    knowledge of prefixes comes from the texts of requests or from the servers' KV events."""

    def route(self, request: Call, ready: Sequence[int], core: int | None = None) -> int: ...
    def report(self, core: int, waiting: int, running: int, received: int) -> None: ...
    def forget(self, core: int) -> None: ...


class RoundRobin:
    """Uses the servers in turn, regardless of their load."""

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
    """All servers of one kind: backends, which answer requests, or servers that only compute prompts."""

    def __init__(
        self,
        config: RouteConfig,
        metrics: RouteMetrics,
        kind: Literal["backend", "prefill"] = "backend",
        cached: "CachedPrefixes | None" = None,
    ) -> None:
        """cached: the servers' cached prefixes, if KV events are enabled."""
        urls = config.backend if kind == "backend" else tuple(server.url for server in config.prefill_servers)
        self.backends = [Backend(i, url, metrics.of_backend(kind, url)) for i, url in enumerate(urls)]
        self._policy = _policy(config, len(urls), cached)
        self._max_connections = config.max_connections

    @property
    def healthy(self) -> list[Backend]:
        return [backend for backend in self.backends if backend.healthy]

    def with_model(self, model: str | None) -> list[Backend]:
        """Return the healthy servers that have a model. None stands for any."""
        return [backend for backend in self.healthy if model is None or model in backend.models]

    def others(self, call: Call, avoided: Collection[Backend]) -> list[Backend]:
        """Return the healthy servers with the request's model and a free connection, except `avoided`."""
        able = self.with_model(call.model)
        return [b for b in able if b.in_flight < self._max_connections and b not in avoided]

    def choose(self, call: Call, avoided: Collection[Backend]) -> Backend | None:
        """Return the server for a request, or None. An avoided server is chosen only if there is no other."""
        ready = self.others(call, avoided) or self.others(call, ())
        if not ready:
            return None
        wanted = None
        if (session := call.session) is not None:
            wanted = max(ready, key=lambda backend: backend.rank(session)).number
        return self.backends[self._policy.route(call, [backend.number for backend in ready], wanted)]

    def report(self, backend: Backend) -> None:
        """Report a server's load to the policy. Requests whose response has not started count as waiting."""
        received = backend.sent - len(backend.unanswered)
        self._policy.report(backend.number, 0, backend.answering + backend.elsewhere, received)

    def join(self, backend: Backend) -> None:
        """Send requests to a server from now on, since it is healthy."""
        if not backend.healthy:
            backend.healthy = True
            backend.metrics.up.set(1)
            logger.info("%s is healthy: it gets requests", backend.url)

    def leave(self, backend: Backend, reason: str) -> None:
        """Send no more requests to a server. Its running requests continue, since it may be draining."""
        if not backend.healthy:
            return
        backend.healthy = False
        backend.metrics.up.set(0)
        logger.warning("%s is not healthy and gets no requests: %s", backend.url, reason)
        self._policy.forget(backend.number)
        backend.sent = backend.elsewhere = 0
        self.report(backend)

    def give_up(self, backend: Backend) -> None:
        """Move the requests that a silent server has not started to answer to other servers."""
        for visit in backend.unanswered:
            visit.interrupt("lost")


class Visit:
    """A request at a server, from the choice to the end of the response; a context manager.

    If it is interrupted before the server responds, TimeoutError is raised in its context; `reason` has the cause.
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
        """Record that the server has started to respond."""
        self._answered = True
        self._backend.unanswered.discard(self)
        self._backend.answering += 1
        self._fleet.report(self._backend)
        if self.reason:  # the response came too late
            self._limit.reschedule(None)

    def interrupt(self, reason: str) -> None:
        """End the visit, unless the server has started to respond."""
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
