"""ASGI middleware. It is plain ASGI, so that streams pass without a copy or an additional task."""

import hashlib
import hmac
import inspect
from collections.abc import Sequence
from typing import Any, cast

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.declaration import imported
from quire.config.engine import ConfigError
from quire.server.errors import ApiError, error_response, path_in

OPEN_PATHS = ("/health", "/ping", "/version", "/metrics")  # need no API key: for probes and scrapers


def add_middleware(app: FastAPI, path: str) -> None:
    """Import the user's middleware from `path` and add it. Raises ConfigError if it cannot be imported or is no
    middleware."""
    middleware: Any = imported("middleware", path)
    if isinstance(middleware, type):
        app.add_middleware(cast(Any, middleware))
    elif inspect.iscoroutinefunction(middleware):
        app.middleware("http")(middleware)
    else:
        raise ConfigError(f"middleware {path!r} must be a class or a coroutine function")


def header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


class RootPath:
    """Also serves everything under a path prefix, behind proxies that strip the prefix and proxies that forward it.

    root_path: the prefix, such as "/llm". It becomes ASGI's `root_path`; after this class, `path` always begins with
    it.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self.root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            path: str = scope["path"]
            inside = path == self.root_path or path.startswith(f"{self.root_path}/")
            scope = {**scope, "root_path": self.root_path, "path": path if inside else self.root_path + path}
        await self.app(scope, receive, send)


def given_key(scope: Scope) -> bytes:
    """Return the API key that a request carries, valid or not; empty without a key."""
    scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else header(scope, b"x-api-key") or b""


def owner_of(scope: Scope) -> str:
    """Return an identifier of the request's API key that does not reveal the key."""
    return hashlib.sha256(b"owner of responses\n" + given_key(scope)).hexdigest()


class ApiKeys:
    """Answers 401 to requests without a valid key, except for OPEN_PATHS and other open paths."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Sequence[str] = ()) -> None:
        self.app, self.keys, self.open_paths = app, [key.encode() for key in keys], {*OPEN_PATHS, *open_paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._may_pass(scope):
            await self.app(scope, receive, send)
            return
        message = "a valid API key is needed, in the header Authorization: Bearer KEY or x-api-key: KEY"
        headers = {"WWW-Authenticate": "Bearer"}
        error = ApiError(401, message, param="Authorization", code="invalid_api_key", headers=headers)
        await error_response(error, scope)(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if path_in(scope) in self.open_paths:
            return True
        given = given_key(scope)
        # All keys are compared, each in constant time, so that timing does not reveal anything about a guess.
        matches = [hmac.compare_digest(given, key) for key in self.keys]
        return given != b"" and any(matches)
