"""Prefixes that are pinned in the cache: /v1/prefixes. Needs --enable-admin-api."""

from typing import Literal, cast

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from quire.messages.changes import PinPrefix
from quire.server.control import check_allowed
from quire.server.errors import ApiError, bad_value, json_response
from quire.server.fields import TokenIds
from quire.server.generation import Server
from quire.server.protocol import TokenizeRequest
from quire.server.routing import StrictRoute, answers

router = APIRouter(route_class=StrictRoute, dependencies=[Depends(check_allowed)])


class PrefixRequest(TokenizeRequest):
    """A prefix as exactly one of prompt, messages and prompt_token_ids."""

    prompt_token_ids: TokenIds | None = None
    cache_salt: str | None = Field(None, min_length=1)


class PrefixCard(TypedDict):
    """tokens: length of the prefix; the last block is only kept if it is full."""

    id: str
    object: Literal["prefix"]
    tokens: int


class PrefixList(TypedDict):
    object: Literal["list"]
    data: list[PrefixCard]


def _server(request: Request) -> Server:
    return cast(Server, request.app.state.server)


def _card(prefix: PinPrefix) -> PrefixCard:
    return {"id": prefix.id, "object": "prefix", "tokens": len(prefix.token_ids)}


@router.post("/v1/prefixes", responses=answers(PrefixCard), response_model=None)
async def pin_prefix(body: PrefixRequest, request: Request) -> Response:
    """Compute a prefix of later prompts, and keep it in the cache of every replica."""
    check_allowed(request)
    server = _server(request)
    if server.config.api_server_count > 1:
        raise ApiError(403, "prefixes can only be pinned with one API process (api_server_count)", code="not_allowed")
    server.accept(body)
    if [body.prompt, body.messages, body.prompt_token_ids].count(None) != 2:
        raise ApiError(400, "one of prompt, messages and prompt_token_ids is needed", param="prompt")
    prompt: dict[str, object] = {}
    if body.prompt_token_ids is not None:
        prompt["prompt_token_ids"] = body.prompt_token_ids
    elif body.messages is None:
        prompt["prompt"] = body.prompt
    else:
        prompt["prompt"] = await server.render(body.messages, body, request.state.body)
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    special = body.messages is None if body.add_special_tokens is None else body.add_special_tokens
    adapter = None if body.model is None else server.adapters.get(body.model)
    try:
        prefix = await server.llm.pin_prefix(prompt, add_special_tokens=special, adapter=adapter)  # type: ignore
    except (ValueError, TypeError) as error:
        raise bad_value(error, PrefixRequest.model_fields, "prompt") from error
    return json_response(_card(prefix))


@router.get("/v1/prefixes", responses=answers(PrefixList), response_model=None)
async def list_prefixes(request: Request) -> Response:
    return json_response({"object": "list", "data": [_card(p) for p in _server(request).llm.prefixes.values()]})


@router.delete("/v1/prefixes/{prefix_id}", responses=answers(dict[str, object]), response_model=None)
async def unpin_prefix(prefix_id: str, request: Request) -> Response:
    """Unpin the prefix, so that it can be evicted."""
    if not await _server(request).llm.unpin_prefix(prefix_id):
        raise ApiError(404, f"there is no prefix {prefix_id[:200]!r}", param="prefix_id", code="not_found")
    return json_response({"id": prefix_id, "object": "prefix", "deleted": True})
