"""How routes read their bodies, and what they declare to answer."""

from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire.messages.errors import error_text
from quire.server.bodies import HeldBody
from quire.server.errors import ApiError, api_error, invalid_request
from quire.server.responses import ErrorResponse

Answers = dict[int | str, dict[str, Any]]


class StrictRoute(APIRoute):
    """A route whose endpoint takes a body, a pydantic model, and the request.

    JSON by the book: UTF-8, no lone surrogates, no NaN, no thousand brackets, and declared as such.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        model: type[BaseModel] = get_type_hints(endpoint)["body"]

        async def handle(request: Request) -> Response:
            try:
                _check_content_type(request)
                held: HeldBody = request.state.body
                response: Response = await endpoint(await held.run(_parse, model, await _read(request)), request)
                return response
            except Exception as error:
                raise api_error(error) from error

        return handle


def _check_content_type(request: Request) -> None:
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    subtype = header.get_content_subtype()
    if header.get_content_maintype() != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise ApiError(415, "Content-Type should be application/json", param="Content-Type")


async def _read(request: Request) -> bytes:
    """The body, of which the request keeps no copy."""
    try:
        return b"".join([chunk async for chunk in request.stream()])
    except ClientDisconnect as error:
        raise ApiError(499, "the client closed the connection") from error


def _parse(model: type[BaseModel], body: bytes) -> BaseModel:
    """Raises ApiError."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error_text(error)}", code="invalid_json") from error
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_request(error.errors(include_url=False), value) from error


def answers(model: Any) -> Answers:
    """What a route declares: the model of its answer, and errors."""
    error = {"model": ErrorResponse}
    return {
        200: {"model": model, "description": "The answer"},
        "4XX": {**error, "description": "The request is wrong; `param` names the field"},
        "5XX": {**error, "description": "The server cannot answer"},
    }


def stream_answers(model: Any) -> Answers:
    """The same for a route that can stream."""
    declared = answers(model)
    declared[200] |= {
        "description": "The answer; with `stream`, its chunks as server-sent events and `data: [DONE]`",
        "content": {"text/event-stream": {}},
    }
    return declared
