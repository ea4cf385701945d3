"""The HTTP client for the servers: sends requests and interprets failures."""

import errno
import io
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import yarl

from quire.messages.errors import error_text
from quire.router.call import Call
from quire.router.config import RouteConfig
from quire.router.errors import RouteError, overloaded
from quire.router.fleet import Backend, Fleet
from quire.router.headers import CONTEXT

if TYPE_CHECKING:
    from quire.server.spans import ServerSpan

OVERLOADED = (429, 503)  # statuses on which another server is tried
_SMALL_BODY = 1 << 16  # bytes; larger bodies are sent piece by piece
_LOCAL_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
# uvicorn, which vLLM uses as well, closes a connection that was idle for 5 s.
_IDLE_SECONDS = 4.0
_NO_DEFAULTS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class NotTaken(Exception):  # noqa: N818
    """A server did not start to respond. reason: unreachable, lost (after it got the request), overloaded, or prefill
    (the prefill server of its request has failed). For a prefill server, also refused (a 4xx) and failed (a 5xx)."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def connect(config: RouteConfig) -> aiohttp.ClientSession:
    """Create the client in the running event loop."""
    return aiohttp.ClientSession(
        # Fleet limits the connections. A limit here would make requests wait without the policy's knowledge.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout),
        skip_auto_headers=_NO_DEFAULTS,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        max_line_size=1 << 16,
        max_field_size=1 << 16,
    )


def send(
    client: aiohttp.ClientSession, backend: Backend, call: Call, body: bytes, headers: Sequence[tuple[str, str]]
) -> Any:
    """Return a context manager for the response. body and headers replace the call's."""
    data: Any = body if len(body) < _SMALL_BODY else io.BytesIO(body)
    url = yarl.URL(backend.url + call.target, encoded=True)
    return request(client, call.span, call.method, url, headers, data or None)


def request(
    client: aiohttp.ClientSession,
    span: "ServerSpan | None",
    method: str,
    url: yarl.URL,
    headers: Sequence[tuple[str, str]],
    data: Any,
) -> Any:
    """Return a context manager for a server's response. span: the span of the client's request; None without
    tracing."""
    if span is None:
        return client.request(method, url, headers=headers, data=data, allow_redirects=False)
    return _traced(client, span, method, url, headers, data)


@asynccontextmanager
async def _traced(
    client: aiohttp.ClientSession,
    span: "ServerSpan",
    method: str,
    url: yarl.URL,
    headers: Sequence[tuple[str, str]],
    data: Any,
) -> AsyncGenerator[aiohttp.ClientResponse]:
    about = {"http.request.method": method, "url.full": str(url.with_query(None)), "server.address": url.host or ""}
    call = span.begin_call(method, {**about, "server.port": url.port or 0})
    passed = [*(pair for pair in headers if pair[0] not in CONTEXT), *call.context.items()]
    status = error_type = None
    try:
        async with client.request(method, url, headers=passed, data=data, allow_redirects=False) as response:
            status = response.status
            yield response
    except BaseException as error:
        error_type = type(error).__name__
        raise
    finally:
        call.end(status, error_type)


def not_taken(fleet: Fleet, backend: Backend, error: Exception) -> NotTaken | RouteError:
    """Convert a client error to the exception for the request. A server that cannot be reached leaves the fleet."""
    text = error_text(error)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno in _LOCAL_ERRORS:
            return overloaded(f"the proxy has no connection left: {text}")
        fleet.leave(backend, text)
        return NotTaken("unreachable", text)
    backend.recheck.set()
    return NotTaken("lost", text)
