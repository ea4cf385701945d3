"""Routes for models, health, version, load and metrics, and two routes that only operators should use."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from quire._version import __version__
from quire.server.errors import ApiError, json_response
from quire.server.generation import Server
from quire.server.middleware import owner_of
from quire.server.protocol import AbortRequest
from quire.server.responses import ModelCard, ModelList
from quire.server.routing import Answers, StrictRoute, answers

router = APIRouter(route_class=StrictRoute)
HEALTH: Answers = {
    200: {"description": "Ready", "content": {"application/json": {"schema": {"type": "object"}}}},
    503: {"description": "Not (yet, or any more)", "content": {}},
}


def _server(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def model_card(server: Server, name: str) -> ModelCard:
    served = server.adapters.by_name.get(name)
    root = server.llm.config.model.model or server.model_names[0]
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "quire",
        "root": root if served is None else served.adapter.path,
        "parent": None if served is None else served.parent,
        "max_model_len": server.llm.max_model_len,
    }


def anthropic_card(name: str, created: int, max_model_len: int | None) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": f"{datetime.fromtimestamp(created, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
        "capabilities": None,
    }


def anthropic_page(
    cards: Mapping[str, dict[str, Any]], limit: int, after_id: str | None, before_id: str | None
) -> dict[str, Any]:
    """Return one page of the model list in Anthropic's format. cards: all models by name. Raises ApiError."""
    names = list(cards)
    pages = {"after_id": after_id, "before_id": before_id}
    for field, name in pages.items():
        if name is not None and name not in names:
            raise ApiError(400, f"{field}: no model has the id {name[:200]!r}", param=field)
    begin = 0 if after_id is None else names.index(after_id) + 1
    end = len(names) if before_id is None else names.index(before_id)
    found = names[begin:end]
    shown = found[:limit] if before_id is None else found[-limit:]
    return {
        "data": [cards[name] for name in shown],
        "has_more": len(shown) < len(found),
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }


def _anthropic_card(server: Server, name: str) -> dict[str, Any]:
    return anthropic_card(name, server.created, server.llm.max_model_len)


ANTHROPIC = Header(alias="anthropic-version", description="Sent by Anthropic's clients, who get their own form.")


@router.get("/v1/models", responses=answers(ModelList), response_model=None)
async def list_models(
    request: Request,
    anthropic_version: Annotated[str | None, ANTHROPIC] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Models on a page of Anthropic's list.")] = 20,
    after_id: str | None = None,
    before_id: str | None = None,
) -> Response:
    server = _server(request)
    if anthropic_version is not None:
        cards = {name: _anthropic_card(server, name) for name in server.names}
        return json_response(anthropic_page(cards, limit, after_id, before_id))
    listed: ModelList = {"object": "list", "data": [model_card(server, name) for name in server.names]}
    return json_response(listed)


@router.get("/v1/models/{model:path}", responses=answers(ModelCard), response_model=None)
async def retrieve_model(
    model: str, request: Request, anthropic_version: Annotated[str | None, ANTHROPIC] = None
) -> Response:
    server = _server(request)
    if model not in server.names:
        raise ApiError(404, f"the model {model[:200]!r} does not exist", param="model", code="model_not_found")
    return json_response((model_card if anthropic_version is None else _anthropic_card)(server, model))


@router.get("/health", responses=HEALTH, response_class=Response)
async def health(request: Request) -> Response:
    """Return 200 if the engine runs, and 503 while it starts or restarts and after it has failed permanently.

    reference_kernels: whether steps run PyTorch operations on a CPU because the kernels are not compiled (yet).
    """
    llm = _server(request).llm
    body = {"reference_kernels": bool(llm.client.stats.runs_reference)}
    return json_response(body) if llm.is_running else Response(status_code=503)


@router.post("/ping", responses=HEALTH, response_class=Response)
@router.get("/ping", responses=HEALTH, response_class=Response)
async def ping(request: Request) -> Response:
    """Same as /health, for SageMaker."""
    return await health(request)


@router.get("/version", responses=answers(dict[str, str]), response_model=None)
async def version() -> Response:
    return json_response({"version": __version__})


@router.get("/load", responses=answers(dict[str, int]), response_model=None)
async def load(request: Request) -> Response:
    """Return the number of running requests."""
    return json_response({"server_load": len(_server(request).calls)})


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    text: bytes = _server(request).llm.render_metrics() + request.app.state.http_metrics.render()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.post("/reset_prefix_cache", response_class=Response)
async def reset_prefix_cache(request: Request, reset_external: bool = False) -> Response:
    """Drop all cached prefixes. reset_external: also those outside the pool, in CPU memory and on disk."""
    await _server(request).llm.reset_prefix_cache(reset_external)
    return Response()


@router.post("/abort_requests", responses=answers(dict[str, int]), response_model=None)
async def abort_requests(body: AbortRequest, request: Request) -> Response:
    """Abort requests of the same API key. Their clients get the text generated so far, with finish_reason "abort"."""
    calls = _server(request).calls_of(owner_of(request.scope), body.request_ids)
    for call in calls:
        call.abort()
    return json_response({"aborted": len(calls)})
