"""The client of the servers: how requests are sent to them, and what it means if that fails."""

import errno
import io
from collections.abc import Sequence
from typing import Any

import aiohttp
import yarl

from quire.messages.errors import error_text
from quire_route.call import Call
from quire_route.config import RouteConfig
from quire_route.errors import RouteError, overloaded
from quire_route.fleet import Backend, Fleet

OVERLOADED = (429, 503)  # statuses with which another server is tried
_SMALL_BODY = 1 << 16  # bytes; larger bodies are sent piece by piece
_LOCAL_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
# uvicorn, which vLLM uses as well, closes a connection that was idle for 5 s.
_IDLE_SECONDS = 4.0
_NO_DEFAULTS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class NotTaken(Exception):  # noqa: N818
    """A server has not begun to answer. reason: unreachable, lost (after it got the request), overloaded, or prefill
    (the prefill server of its request has failed). Of a prefill server, also refused (a 4xx) and failed (a 5xx)."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def connect(config: RouteConfig) -> aiohttp.ClientSession:
    """The client, in the loop that runs now."""
    return aiohttp.ClientSession(
        # Fleet limits the connections. A limit here would let requests wait where no policy sees them.
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
    """A context manager of the response to a request, which has this body and these headers instead of the call's."""
    data: Any = body if len(body) < _SMALL_BODY else io.BytesIO(body)
    url = yarl.URL(backend.url + call.target, encoded=True)
    return client.request(call.method, url, headers=headers, data=data or None, allow_redirects=False)


def not_taken(fleet: Fleet, backend: Backend, error: Exception) -> NotTaken | RouteError:
    """What became of a request, from the client's error. A server that cannot be reached leaves the fleet."""
    text = error_text(error)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno in _LOCAL_ERRORS:
            return overloaded(f"the proxy has no connection left: {text}")
        fleet.leave(backend, text)
        return NotTaken("unreachable", text)
    backend.recheck.set()
    return NotTaken("lost", text)
