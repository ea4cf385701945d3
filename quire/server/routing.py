"""How routes read their bodies and declare their responses."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, get_type_hints

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
Model = TypeVar("Model", bound=BaseModel)


class StrictRoute(APIRoute):
    """A route whose endpoint takes a body, a pydantic model, and the request. Other endpoints work as usual in FastAPI.

    The body must be strict JSON: UTF-8, no lone surrogates, no NaN, no excessive nesting. Its content type is ignored,
    since clients of some APIs send none or a wrong one; origins.py blocks pages of other origins.

    names: for an API whose bodies become chat requests, its names for the fields of ChatRequest, which errors then use.
    """

    names: Mapping[str, str] = {}

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        model: type[BaseModel] | None = get_type_hints(endpoint).get("body")
        if model is None:
            return super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                held: HeldBody = request.state.body
                response: Response = await endpoint(await held.run(parse_body, model, await _read(request)), request)
                return response
            except Exception as error:
                raise api_error(error).renamed(self.names) from error

        return handle


async def _read(request: Request) -> bytes:
    """Read the body. The request keeps no copy."""
    try:
        return b"".join([chunk async for chunk in request.stream()])
    except ClientDisconnect as error:
        raise ApiError(499, "the client closed the connection") from error


def parse_body(model: type[Model], body: bytes) -> Model:
    """Raises ApiError."""
    if not body:
        raise ApiError(400, "the body is empty; it should be a JSON object", code="invalid_json")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error_text(error)}", code="invalid_json") from error
    return validated(model, value)


def validated(model: type[Model], value: object) -> Model:
    """Validate a value. Raises ApiError, which names the invalid field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_request(error.errors(include_url=False), value) from error


def answers(model: Any, error: Any = ErrorResponse) -> Answers:
    """Declare a route's response model and error model."""
    return {
        200: {"model": model, "description": "The answer"},
        "4XX": {"model": error, "description": "The request is wrong; the error names the field"},
        "5XX": {"model": error, "description": "The server cannot answer"},
    }


def stream_answers(model: Any, error: Any = ErrorResponse, media_type: str = "text/event-stream") -> Answers:
    """Declare the same for a route that can stream. media_type: the stream's type."""
    declared = answers(model, error)
    declared[200] |= {"description": "The answer, or with `stream` its parts as they come", "content": {media_type: {}}}
    return declared
