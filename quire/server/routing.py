"""How routes read their bodies, and what they declare to answer."""

from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire.messages.errors import error_text
from quire.server.errors import ApiError, api_error
from quire.server.responses import ErrorResponse

Answers = dict[int | str, dict[str, Any]]


class _StrictRequest(Request):
    """JSON by the book: UTF-8, no lone surrogates, no NaN, no thousand brackets, and declared as such."""

    async def body(self) -> bytes:
        header = Message()
        header["content-type"] = self.headers.get("content-type", "")
        subtype = header.get_content_subtype()
        if header.get_content_maintype() != "application" or not (subtype == "json" or subtype.endswith("+json")):
            raise ApiError(415, "Content-Type should be application/json", param="Content-Type")
        try:
            return await super().body()
        except ClientDisconnect as error:
            raise ApiError(499, "the client closed the connection") from error

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error_text(error)}", code="invalid_json") from error


class StrictRoute(APIRoute):
    """A route that takes a body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            try:
                return await handle(_StrictRequest(request.scope, request.receive))
            except Exception as error:
                raise api_error(error) from error

        return strict


def answers(model: Any) -> Answers:
    """What a route declares: the model of its answer, and errors."""
    error = {"model": ErrorResponse}
    return {
        200: {"model": model, "description": "The answer"},
        "4XX": {**error, "description": "The request is wrong; `param` names the field"},
        "5XX": {**error, "description": "The server cannot answer"},
    }


def stream_answers(model: Any) -> Answers:
    """The same of a route that can stream."""
    declared = answers(model)
    declared[200] |= {
        "description": "The answer; with `stream`, its chunks as server-sent events and `data: [DONE]`",
        "content": {"text/event-stream": {}},
    }
    return declared
