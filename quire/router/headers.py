"""The headers that a proxy forwards, and those that apply to one connection only (RFC 9110, section 7.6.1)."""

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from quire.router.errors import RouteError

Header = tuple[bytes, bytes]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
# The HTTP client creates these headers itself.
_REPLACED = frozenset(b"host content-length expect x-request-id x-forwarded-for x-forwarded-host".split())
# The request headers of W3C Trace Context.
CONTEXT = ("traceparent", "tracestate")
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


def header(headers: Iterable[Header], name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)


def request_id_of(headers: Iterable[Header]) -> bytes:
    """Return the request id from X-Request-Id, or a new one if it is missing or invalid."""
    given = header(headers, b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return os.urandom(16).hex().encode()


def to_server(scope: Any, request_id: bytes) -> list[tuple[str, str]]:
    """Return the headers of the forwarded request. Raises RouteError for a header that is not UTF-8."""
    headers: Sequence[Header] = scope["headers"]
    dropped = _HOP_BY_HOP | _REPLACED | _named_by_connection(headers)
    passed = [(name, value) for name, value in headers if name not in dropped]
    passed.append((b"x-request-id", request_id))
    if client := scope.get("client"):
        path = [value for name, value in headers if name == b"x-forwarded-for"]
        passed.append((b"x-forwarded-for", b", ".join([*path, str(client[0]).encode()])))
    if host := header(headers, b"x-forwarded-host") or header(headers, b"host"):
        passed.append((b"x-forwarded-host", host))
    if header(headers, b"x-forwarded-proto") is None:
        passed.append((b"x-forwarded-proto", scope["scheme"].encode()))
    try:
        return [(name.decode("ascii"), value.decode()) for name, value in passed]
    except UnicodeDecodeError:
        raise RouteError(400, "a header of the request is not UTF-8", "bad_header") from None


def to_client(headers: Sequence[Header], request_id: bytes) -> list[Header]:
    """Return the headers of the forwarded response. The request's id is added if it is missing."""
    lower = [(name.lower(), value) for name, value in headers]
    dropped = _HOP_BY_HOP | _named_by_connection(lower)
    passed = [(name, value) for name, value in lower if name not in dropped]
    if header(passed, b"x-request-id") is None:
        passed.append((b"x-request-id", request_id))
    return passed


def _named_by_connection(headers: Iterable[Header]) -> frozenset[bytes]:
    """Return the headers that `Connection` names, in lower case."""
    value = header(headers, b"connection")
    if value is None or value.lower() in (b"keep-alive", b"close"):
        return frozenset()
    return frozenset(name.strip().lower() for name in value.split(b","))
