"""Blocks requests from web pages of other origins.

Browsers send a request's origin in `Sec-Fetch-Site` and `Origin`, which pages cannot set. Other clients send neither.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.errors import ApiError, error_response
from quire.server.middleware import header

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # they change nothing, and browsers hide the response from other origins
_PORTS = {"http": ":80", "https": ":443"}


class OriginGuard:
    """Answers 403 to requests from web pages, except for the server's own page and pages of allowed origins."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        """allowed: origins such as "https://chat.example"; "*" allows all."""
        self.app = app
        self.allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _SAFE_METHODS or self._may_pass(scope):
            await self.app(scope, receive, send)
            return
        origin = (header(scope, b"origin") or b"null").decode("latin-1")[:200]
        message = f"web pages of the origin {origin!r} may not call this server; --allowed-origins names those that may"
        await error_response(ApiError(403, message, param="Origin", code="origin_not_allowed"), scope)(
            scope, receive, send
        )

    def _may_pass(self, scope: Scope) -> bool:
        origin = header(scope, b"origin")
        site = header(scope, b"sec-fetch-site")
        if "*" in self.allowed or site in (b"same-origin", b"none"):
            return True
        if origin is None:
            return site is None
        return origin.decode("latin-1") in self.allowed or (site is None and _is_own(scope, origin))


def _is_own(scope: Scope, origin: bytes) -> bool:
    """Whether pages of this origin come from this server or from the proxy in front of it. Browsers omit Sec-Fetch-Site
    over plain HTTP, except for localhost."""
    try:
        page = urlsplit(origin.decode("ascii").lower())
    except ValueError:
        return False
    default_port = _PORTS.get(page.scheme)
    if default_port is None:
        return False
    hosts = (header(scope, name) or b"" for name in (b"host", b"x-forwarded-host"))
    names = (host.decode("latin-1").lower().removesuffix(default_port) for host in hosts)
    return page.netloc.removesuffix(default_port) in names
