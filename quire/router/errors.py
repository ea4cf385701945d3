"""Errors of the proxy itself, in OpenAI's format. Errors of the servers are forwarded unchanged."""

from collections.abc import Mapping
from typing import Any

import msgspec

_TYPES = {401: "authentication_error"}


class RouteError(Exception):
    """A request that no server could handle: the status, message and code of the error response."""

    def __init__(self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error: dict[str, Any] = {"message": self.message, "type": kind, "param": None, "code": self.code}
        return msgspec.json.encode({"error": error})


def overloaded(message: str) -> RouteError:
    return RouteError(503, message, "server_overloaded", {"Retry-After": "1"})
