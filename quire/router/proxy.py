"""The ASGI application: it forwards each request to a server, and streams the response back."""

import asyncio
import contextlib
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from quire.messages.errors import error_text
from quire.observability.logging import logger, printable
from quire.router.bodies import Bodies, ClientLeft, HeldBody, Receive
from quire.router.call import Call
from quire.router.client import OVERLOADED, NotTaken, not_taken, send
from quire.router.config import RouteConfig
from quire.router.errors import RouteError, overloaded
from quire.router.fleet import Backend, Fleet, Visit
from quire.router.headers import header, request_id_of, to_client, to_server
from quire.router.metrics import RouteMetrics
from quire.router.prefill import Prefill, Prefills
from quire.server.access_log import AccessLog
from quire.server.tracing import route_of

if TYPE_CHECKING:
    from quire.router.decisions import Decisions
    from quire.router.prefix_index import Tokens
    from quire.semantic.recorder import Recorder
    from quire.server.spans import ServerSpan, Tracing

Send = Callable[[Any], Awaitable[None]]

_SHUTTING_DOWN = RouteError(503, "the proxy is shutting down", "shutting_down")
_INTERNAL_ERROR = RouteError(500, "internal error; the proxy's log says more", "internal_error")


@dataclass(frozen=True)
class Extras:
    """What a proxy has only if its options ask for it. prefills: lets prefill servers compute prompts. tokens:
    tokenizes requests for the policy. access_log: gets a line per request. tracing: creates spans. decisions: the
    semantic router."""

    prefills: Prefills | None = None
    tokens: "Tokens | None" = None
    access_log: AccessLog | None = None
    tracing: "Tracing | None" = None
    decisions: "Decisions | None" = None


class Proxy:
    """config: limits for retries. keys: valid API keys; if empty, none is required."""

    def __init__(
        self,
        config: RouteConfig,
        keys: Sequence[str],
        client: aiohttp.ClientSession,
        bodies: Bodies,
        fleet: Fleet,
        metrics: RouteMetrics,
        extras: Extras,
    ) -> None:
        self.config = config
        self.client = client
        self.bodies = bodies
        self.fleet = fleet
        self.metrics = metrics
        self._extras = extras
        self._keys = [key.encode() for key in keys]
        self._session_header = (config.session_header or "").lower().encode()
        self._own = {"/health": self._show_health, "/metrics": self._show_metrics}
        if config.by_model:
            self._own["/v1/models"] = self._show_models
        self.running: set[asyncio.Task[Any]] = set()
        self.ending = False  # running requests are ended with an error

    def end_running(self) -> None:
        """End all requests with an error, or cut off their responses."""
        self.ending = True
        for task in self.running:
            task.cancel()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] in ("GET", "HEAD") and (own := self._own.get(scope["path"])):
            await own(send)
            return
        span = (
            None
            if self._extras.tracing is None
            else self._extras.tracing.begin(scope, scope["path"], route_of(scope["path"]))
        )
        answer = _Answer(send, request_id_of(scope["headers"]), span)
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        try:
            await self._answer(scope, receive, answer)
        except RouteError as error:
            await self._send_error(scope, answer, error)
        except ClientLeft:
            self.metrics.disconnects.inc()
        except asyncio.CancelledError:
            if answer.client_left:
                self.metrics.disconnects.inc()
            elif self.ending:
                await self._send_error(scope, answer, _SHUTTING_DOWN)
            else:
                raise
        except Exception:
            logger.exception("Request %s failed", answer.name, extra=answer.fields())
            await self._send_error(scope, answer, _INTERNAL_ERROR)
        finally:
            self.running.discard(task)
            if (log := self._extras.access_log) is not None:
                log.write(scope, answer.status or 499, answer.sent)  # 499: the client disconnected
            answer.end_span()

    # ---- a request

    async def _answer(self, scope: Any, receive: Receive, answer: "_Answer") -> None:
        headers = scope["headers"]
        api_key = self._check_key(scope)
        held = HeldBody(self.bodies)
        try:
            body = await held.read(receive, header(headers, b"content-length"))
            call = Call(scope["method"], _target(scope), to_server(scope, answer.request_id), body, answer.name)
            call.session = self._session(headers, call)
            call.span = answer.span
            watch = asyncio.create_task(answer.watch(receive, asyncio.current_task()))
            try:
                if await self._is_decided(call, api_key, answer):
                    return
                if self.config.by_model:
                    call.model = call.requested_model
                await self._send_until_answered(call, held, answer)
            finally:
                watch.cancel()
        finally:
            held.release()

    async def _is_decided(self, call: Call, api_key: bytes, answer: "_Answer") -> bool:
        """Let the semantic router change a request. Returns whether it was answered from the cache."""
        decisions = self._extras.decisions
        decision = None if decisions is None else await decisions.decide(call, api_key)
        if decisions is None or decision is None:
            return False
        answer.headers.append((b"x-quire-route", decision.header.encode()))
        if decision.hit is not None:
            stored = decision.hit.answer
            answer.headers.append((b"content-length", str(len(stored.body)).encode()))
            await answer.begin(200, to_client(stored.headers, answer.request_id))
            await answer.end(stored.body)
            return True
        answer.recorder = decisions.recorder(decision)
        return False

    def _check_key(self, scope: Any) -> bytes:
        """Return the request's API key. Raises RouteError if a key is needed and it is not valid. OPTIONS, which
        browsers send before a request, needs none."""
        scheme, _, token = (header(scope["headers"], b"authorization") or b"").partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else header(scope["headers"], b"x-api-key") or b""
        if not self._keys or scope["method"] == "OPTIONS":
            return given
        # All keys are compared, each in constant time, so that timing does not reveal anything about a guess.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if not (given and any(matches)):
            message = "a valid API key is needed, in the header Authorization: Bearer KEY or x-api-key: KEY"
            raise RouteError(401, message, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
        return given

    def _session(self, headers: Any, call: Call) -> bytes | None:
        """Return the session id of a request, or None."""
        if self._session_header and (named := header(headers, self._session_header)):
            return named
        if self.config.session_field and (field := call.fields.get(self.config.session_field)):
            return bytes(field)
        return None

    async def _send_until_answered(self, call: Call, held: HeldBody, answer: "_Answer") -> None:
        """Send a request to one server after another until one responds.

        Unreachable servers do not count as attempts, and an overloaded server is avoided once. A request that was lost
        with its server is retried at most `max_retries` times, since it may be the cause.
        """
        avoided: set[Backend] = set()
        losses = 0
        may_avoid = True
        extras = self._extras
        if extras.tokens is not None and call.session is None:
            await extras.tokens.find(call)
        prefill = None if extras.prefills is None else extras.prefills.of(call)
        while True:
            backend = self.fleet.choose(call, avoided)
            if backend is None:
                raise self._nobody(call)
            avoided.add(backend)
            try:
                can_avoid = may_avoid and bool(self.fleet.others(call, avoided))
                await self._visit(call, prefill, backend, held, answer, can_avoid)
            except NotTaken as error:
                if error.reason == "prefill":  # the failure is not this server's
                    avoided.discard(backend)
                    continue
                losses += error.reason == "lost"
                may_avoid &= error.reason != "overloaded"
                backend.metrics.count_retry(error.reason)
                if losses > self.config.max_retries:
                    raise RouteError(502, "the server was lost before it answered", "backend_lost") from error
                logger.warning(
                    "Request %s: %s: %s; trying again",
                    answer.name,
                    backend.url,
                    error_text(error),
                    extra=answer.fields(backend=backend.url, reason=error.reason),
                )
            else:
                return

    def _nobody(self, call: Call) -> RouteError:
        if self.fleet.with_model(call.model):
            return overloaded("all servers have as many requests as they may; try again")
        if self.fleet.healthy and not any(call.model in backend.models for backend in self.fleet.backends):
            return RouteError(404, f"The model `{call.model}` does not exist.", "model_not_found")
        which = "no server" if call.model is None else f"no server with the model `{call.model}`"
        return RouteError(503, f"{which} is healthy", "no_healthy_backend", {"Retry-After": "1"})

    async def _visit(
        self, call: Call, prefill: Prefill | None, backend: Backend, held: HeldBody, answer: "_Answer", may_avoid: bool
    ) -> None:
        """Send a request to a server, and forward its response. Raises NotTaken if nothing was forwarded.

        may_avoid: whether another server can be tried if this one is overloaded.
        """
        began = time.perf_counter()
        visit = Visit(self.fleet, backend)
        try:
            async with visit, contextlib.AsyncExitStack() as stack:
                body = call.body if prefill is None else await stack.enter_async_context(prefill.begin(visit))
                try:
                    request = send(self.client, backend, call, body, call.headers)
                    response = await stack.enter_async_context(request)
                    # The head is sent with the first bytes of the body: until then the request can be retried.
                    chunk = await response.content.readany()
                except (aiohttp.ClientError, OSError) as error:
                    raise not_taken(self.fleet, backend, error) from error
                if may_avoid and response.status in OVERLOADED:
                    raise NotTaken("overloaded", f"has no room (status {response.status})")
                visit.answered()
                call.drop_body()
                body = b""
                held.release()
                backend.metrics.count_answer(response.status)
                backend.metrics.first_byte.observe(time.perf_counter() - began)
                await self._pass_on(response, chunk, answer)
        except TimeoutError as error:  # of the visit
            raise NotTaken(visit.reason, "it does not respond") from error

    async def _pass_on(self, response: aiohttp.ClientResponse, chunk: bytes, answer: "_Answer") -> None:
        """Forward a response whose first bytes are `chunk`. Raises RouteError if its server is lost."""
        await answer.begin(response.status, to_client(response.raw_headers, answer.request_id))
        try:
            while not response.content.at_eof():
                await answer.send(chunk)
                chunk = await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise RouteError(502, f"{response.url.origin()}: {error_text(error)}", "backend_lost") from error
        await answer.end(chunk)
        if answer.recorder is not None:
            answer.recorder.end()

    # ---- responses of the proxy itself

    async def _send_error(self, scope: Any, answer: "_Answer", error: RouteError) -> None:
        self.metrics.errors.labels(error.code).inc()
        answer.error = error
        path = printable(scope["path"], 200)
        status = answer.status or error.status
        fields = answer.fields(path=path, status=status, error=error.message, error_code=error.code)
        if answer.status:
            logger.error("Request %s: %s: the answer ends early: %s", answer.name, path, error.message, extra=fields)
            return  # uvicorn closes the connection, so the client notices the incomplete response
        level = logger.error if error.status >= 500 else logger.warning
        level("Request %s: %s: %d: %s", answer.name, path, error.status, error.message, extra=fields)
        headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        await answer.send_whole(error.status, error.body, b"application/json", headers)

    async def _show_health(self, send: Send) -> None:
        status = 200 if self.fleet.healthy else 503
        await _Answer(send, b"").send_whole(status, b"", b"text/plain")

    async def _show_models(self, send: Send) -> None:
        """List the models of all healthy servers, and the names to which the semantic router's rules apply."""
        models = {name: entry for backend in self.fleet.healthy for name, entry in backend.models.items()}
        if (decisions := self._extras.decisions) is not None:
            models |= {name: {"id": name, "object": "model", "owned_by": "quire"} for name in decisions.names}
        body = msgspec.json.encode({"object": "list", "data": list(models.values())})
        await _Answer(send, b"").send_whole(200, body, b"application/json")

    async def _show_metrics(self, send: Send) -> None:
        text = self.metrics.render()
        await _Answer(send, b"").send_whole(200, text, b"text/plain; version=0.0.4; charset=utf-8")


def _target(scope: Any) -> str:
    """Return the path and query of a request as sent. Raises RouteError for targets like `*`, which would become part
    of the server's name."""
    path: bytes = scope["raw_path"]
    if not path.startswith(b"/"):
        raise RouteError(400, "the path must begin with a slash", "bad_path")
    query: bytes = scope["query_string"]
    return (path + b"?" + query if query else path).decode("ascii")


class _Answer:
    """The response to the client. status: 0 until it starts. sent: bytes of its body. span: the request's span, if
    tracing is enabled. error: the proxy's own error."""

    def __init__(self, send: Send, request_id: bytes, span: "ServerSpan | None" = None) -> None:
        self._send = send
        self.request_id = request_id
        self.span = span
        self.error: RouteError | None = None
        self.name = request_id.decode("ascii")
        self.status = self.sent = 0
        self.headers: list[tuple[bytes, bytes]] = []  # added to those of the response
        self.recorder: Recorder | None = None  # if the response is stored in the semantic cache
        self.ended = self.client_left = False

    def fields(self, **fields: Any) -> dict[str, Any]:
        """Return the structured fields of the request's log line."""
        return {"fields": {"request_id": self.name, **fields}}

    async def watch(self, receive: Receive, task: "asyncio.Task[Any] | None") -> None:
        """Cancel the task that responds if the client disconnects before the end."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.ended and task is not None:
            self.client_left = True
            task.cancel()

    async def begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status
        if self.recorder is not None:
            self.recorder.begin(status, headers)
        headers = [*headers, *self.headers]
        if self.span is not None:
            name, value = self.span.response_header
            headers = [*(pair for pair in headers if pair[0] != name), (name, value)]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, chunk: bytes) -> None:
        if self.recorder is not None:
            self.recorder.add(chunk)
        self.sent += len(chunk)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self, chunk: bytes) -> None:
        if self.recorder is not None:
            self.recorder.add(chunk)
        self.ended = True
        self.sent += len(chunk)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    def end_span(self) -> None:
        if self.span is None:
            return
        if self.status:
            self.span.set({"http.response.status_code": self.status})
        if self.error is not None:
            ours = self.error.status >= 500
            self.span.end(self.error.code, self.error.message if ours else None, ours)
        elif self.client_left or not self.status:
            self.span.end("499")
        else:
            self.span.end(str(self.status) if self.status >= 400 else None, is_ours=self.status >= 500)

    async def send_whole(
        self, status: int, body: bytes, kind: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        about = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        if self.request_id:
            about.append((b"x-request-id", self.request_id))
        await self.begin(status, [*about, *headers])
        await self.end(body)
