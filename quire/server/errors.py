"""Errors in the format of the requested API: OpenAI's, Anthropic's or Ollama's."""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from quire.engine.processor import PromptTooLongError
from quire.messages.errors import EngineDeadError, error_text
from quire.observability.logging import logger
from quire.platform.untrusted.limits import BusyError
from quire.server.fields import TABLES

MAX_FIELD = 100  # characters of a field's name in an error
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES: dict[str, str] = TABLES["anthropic"]["errors"]
_CODES = {404: "not_found", 405: "method_not_allowed"}
_QUOTED = ("structured_outputs", "stop", "bad_words")  # fields whose text the engine's messages quote
_QUOTING = ("constraint", "union_tag_invalid")  # pydantic error types whose messages quote values

# Messages for pydantic errors whose original messages name Python types.
_OBJECT = "Input should be an object"
_MESSAGES = {
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "int_parsing_size": "Input should be an integer with fewer digits",
}


class ApiError(HTTPException):
    """An error response: its status and message. param: the path of the wrong field, such as `messages[0].role`.

    quotes: whether the message may quote a prompt or an output, so that it must not be logged.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        quotes: bool = False,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code
        self.quotes = quotes

    @property
    def logged(self) -> str:
        """Return the message for the log."""
        reason = "the reason may quote the request, so only the answer has it"
        return f"{self.param or 'the request failed'}: {reason}" if self.quotes else self.detail

    def body(self, path: str) -> dict[str, Any]:
        """Return the body of the error response to a request for `path`.

        OpenAI: {"error": {"message", "type", "param", "code"}}. Anthropic: {"type": "error", "error": {"type",
        "message"}}. Ollama: {"error": message}. The last two have no key for the field, so their message names it.
        """
        status = self.status_code
        message = self.detail
        if not path.startswith(("/v1/messages", "/api/")):
            kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
            return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}
        if self.param and self.param not in message:
            message = f"{self.param}: {message}"
        if path.startswith("/api/"):
            return {"error": message}
        kind = _ANTHROPIC_TYPES.get(str(status), "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def renamed(self, names: Mapping[str, str]) -> "ApiError":
        """Return the same error with its field renamed, if `names` has it."""
        field = re.split(r"\W", self.param or "", maxsplit=1)[0]
        if (name := names.get(field)) is None:
            return self
        message = self.detail.replace(field, name, 1)
        param = name + (self.param or "").removeprefix(field)
        return ApiError(
            self.status_code, message, param=param, code=self.code, headers=self.headers, quotes=self.quotes
        )


class _Unquoted(Exception):  # noqa: N818
    """Replaces an unexpected exception in the log. It shows only the type, since the original text may quote a
    prompt."""


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def path_in(scope: Scope) -> str:
    """Return the path of a request, without the server's root path."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def error_response(error: ApiError, scope: Scope) -> Response:
    scope.setdefault("state", {})["error"] = error  # for the log
    return json_response(error.body(path_in(scope)), error.status_code, error.headers)


def bad_value(error: Exception, fields: Iterable[str], default: str) -> ApiError:
    """Return a 400 for a value that the engine rejected. The field is found in the engine's message."""
    message = error_text(error)
    path = re.match(r"messages[\w.\[\]]*", message)
    names = sorted({*fields} - {"model"}, key=len, reverse=True)  # "model" occurs in messages about other fields, too
    named = re.search(rf"\b(prompt logprobs|{'|'.join(names)})\b", message)
    param = default
    if path:
        param = path[0].rstrip(".")
    elif named and not isinstance(error, PromptTooLongError):
        param = named[0].replace(" ", "_")
    code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
    return ApiError(400, message, param=param, code=code, quotes=param in _QUOTED)


def invalid_request(errors: Iterable[Mapping[str, Any]], body: object) -> ApiError:
    """Return a 400 for one of pydantic's errors: the first of those deepest in the body."""
    found: dict[str, list[str]] = {}
    deepest = -1
    quotes = False
    for error in errors:
        quotes |= error["type"] in _QUOTING
        path, depth = _path_in(body, error)
        if depth > deepest:
            found = {}
            deepest = depth
        if depth == deepest:
            message = _MESSAGES.get(error["type"], error["msg"])
            found.setdefault(path, []).append(message if path else "the body should be a JSON object")
    path, messages = next(iter(found.items()))
    text = " or ".join(dict.fromkeys(messages))
    return ApiError(400, f"{path}: {text}" if path else text, param=path or None, quotes=quotes)


def _path_in(body: object, error: Mapping[str, Any]) -> tuple[str, int]:
    """Return (path, depth) of an error, without the type names that pydantic inserts for unions."""
    path = ""
    depth = 0
    steps = error["loc"]
    for index, step in enumerate(steps):
        if isinstance(body, list) and isinstance(step, int):
            path = f"{path}[{step}]"
            body = body[step]
        elif isinstance(body, dict) and (step in body or (error["type"] == "missing" and index == len(steps) - 1)):
            name = str(step)[:MAX_FIELD]
            path = f"{path}.{name}" if path else name
            body = body.get(step)
        else:
            continue
        depth += 1
    return path, depth


def api_error(error: Exception) -> ApiError:
    """Return the error response for any exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # raised by a user's middleware; the router's are handled below
        return ApiError(error.status_code, error.detail, code=_CODES.get(error.status_code), headers=error.headers)
    if isinstance(error, EngineDeadError):
        return ApiError(503, error_text(error), code="engine_dead")
    if isinstance(error, BusyError):
        return ApiError(503, error_text(error), code="server_overloaded", headers={"Retry-After": "1"})
    exception: Exception = error
    if not logger.isEnabledFor(logging.DEBUG):
        exception = _Unquoted(type(error).__qualname__).with_traceback(error.__traceback__)
    logger.error("A request failed", exc_info=exception)
    return ApiError(500, "internal error; the server's log says more", code="internal_error")


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    """Return the response for an unknown path or method. It names both."""
    message = error.detail
    headers = dict(error.headers or {})
    if error.status_code == 404:
        message = f"unknown URL: {request.method} {request.url.path[:200]}; /docs lists those that there are"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed for {request.url.path[:200]}; use {headers.get('Allow', 'POST')}"
    return ApiError(error.status_code, message, code=_CODES.get(error.status_code), headers=headers)


def add_error_handlers(app: FastAPI) -> None:
    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and not isinstance(error, ApiError):
            error = _routing_error(request, error)
        return error_response(api_error(error), request.scope)

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return error_response(ApiError(400, f"{name}: {first['msg']}", param=name), request.scope)

    app.add_exception_handler(RequestValidationError, refuse)  # for a parameter in the URL
    app.add_exception_handler(HTTPException, handle)  # other exceptions end up in the Observability middleware
