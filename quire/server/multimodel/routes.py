"""Routes about all models together: lists, loading and unloading, health and metrics."""

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from quire._version import __version__
from quire.server.admin_routes import ANTHROPIC, HEALTH, anthropic_card, anthropic_page, model_card
from quire.server.errors import ApiError, json_response
from quire.server.middleware import owner_of
from quire.server.multimodel.served_model import ServedModel, Status
from quire.server.multimodel.table import ModelTable
from quire.server.protocol import AbortRequest
from quire.server.responses import ModelList
from quire.server.routing import StrictRoute, answers

router = APIRouter(route_class=StrictRoute)
_STATUS = {  # llama.cpp's names
    Status.UNLOADED: "unloaded",
    Status.FAILED: "unloaded",
    Status.UNLOADING: "unloaded",
    Status.PREPARING: "loading",
    Status.QUEUED: "loading",
    Status.LOADING: "loading",
    Status.LOADED: "loaded",
}


def _table(request: Request) -> ModelTable:
    table: ModelTable = request.app.state.table
    return table


async def _status(model: ServedModel) -> dict[str, Any]:
    """Return a model's status as llama.cpp's router does, with the reason of a failure."""
    value = _STATUS[model.status]
    if model.loaded is not None and await model.loaded.llm.is_sleeping():
        value = "sleeping"
    options = {**model.declaration.engine, **model.declaration.server}
    flags = [part for name, given in options.items() for part in (f"--{name.replace('_', '-')}", str(given))]
    status: dict[str, Any] = {
        "value": value,
        "args": ["quire", "serve", *filter(None, [model.declaration.model]), *flags],
    }
    if model.status is Status.FAILED:
        status |= {"failed": True, "exit_code": 1, "error": model.problem}
    return status


async def _card(table: ModelTable, model: ServedModel, name: str) -> dict[str, Any]:
    """Return the entry of a model or adapter in the lists of models."""
    card: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": table.created,
        "owned_by": "quire",
        "root": model.declaration.model or model.name,
        "parent": None,
        "max_model_len": None,
    }
    if model.loaded is not None:
        card = {**model_card(model.loaded.server, name)}
    elif name not in model.declaration.owned_names:
        card["parent"] = model.name
    return {**card, "status": await _status(model)}


def _ruled_card(table: ModelTable, name: str) -> dict[str, Any]:
    """Return the entry of a name for which the semantic router chooses a model."""
    return {"id": name, "object": "model", "created": table.created, "owned_by": "quire", "root": name, "parent": None}


def _anthropic_card(table: ModelTable, name: str) -> dict[str, Any]:
    model = table.get(name)
    length = None if model is None or model.loaded is None else model.loaded.llm.max_model_len
    return anthropic_card(name, table.created, length)


@router.get("/v1/models", responses=answers(ModelList), response_model=None)
async def list_models(
    request: Request,
    anthropic_version: Annotated[str | None, ANTHROPIC] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Models on a page of Anthropic's list.")] = 20,
    after_id: str | None = None,
    before_id: str | None = None,
) -> Response:
    table = _table(request)
    await table.refresh()
    names = [(model, name) for model in table.models for name in model.names]
    if anthropic_version is not None:
        of_anthropic = {name: _anthropic_card(table, name) for _, name in names}
        return json_response(anthropic_page(of_anthropic, limit, after_id, before_id))
    cards = [await _card(table, model, name) for model, name in names]
    ruled = [_ruled_card(table, name) for name in request.app.state.ruled_names]
    return json_response({"object": "list", "data": [*cards, *ruled]})


@router.get("/v1/models/{model:path}", responses=answers(dict[str, Any]), response_model=None)
async def retrieve_model(
    model: str, request: Request, anthropic_version: Annotated[str | None, ANTHROPIC] = None
) -> Response:
    table = _table(request)
    found = await table.find(model)
    if anthropic_version is not None:
        return json_response(_anthropic_card(table, model))
    return json_response(await _card(table, found, model))


class ModelRequest(BaseModel):
    model: str


@router.get("/models", responses=answers(dict[str, Any]), response_model=None)
async def list_states(request: Request, reload: bool = False) -> Response:
    """List the models with their states, as llama.cpp's router does."""
    table = _table(request)
    await table.refresh()
    return json_response({"object": "list", "data": [await _state(table, model) for model in table.models]})


async def _state(table: ModelTable, model: ServedModel) -> dict[str, Any]:
    expires = model.expires_at
    return {
        **await _card(table, model, model.name),
        "path": model.declaration.model or "",
        "aliases": list(model.names[1:]),
        "pinned": model.is_pinned,
        "memory": model.memory,
        "needed_memory": None if model.need is None else model.need.least,
        "requests": model.num_running,
        "expires_at": None if expires is None else datetime.fromtimestamp(expires, UTC).isoformat(),
    }


@router.post("/models/load", responses=answers(dict[str, bool]), response_model=None)
async def load_model(body: ModelRequest, request: Request) -> Response:
    """Begin to load a model. GET /models shows when it is loaded."""
    table = _table(request)
    model = await table.find(body.model)
    if model.is_open:
        raise ApiError(400, "model is already loaded", param="model", code="model_already_loaded")
    table.load(model)
    return json_response({"success": True})


@router.post("/models/unload", responses=answers(dict[str, bool]), response_model=None)
async def unload_model(body: ModelRequest, request: Request) -> Response:
    """Unload a model as soon as no request uses it."""
    table = _table(request)
    model = await table.find(body.model)
    if model.loaded is None:
        raise ApiError(400, "model is not loaded", param="model", code="model_not_loaded")
    await table.unload(model)
    return json_response({"success": True})


@router.get("/health", responses=HEALTH, response_class=Response)
async def health(request: Request) -> Response:
    """Return 200: the server accepts requests. reference_kernels: whether any loaded model computes without compiled
    kernels (yet)."""
    runs_reference = any(loaded.llm.client.stats.runs_reference for _, loaded in _table(request).loaded)
    return json_response({"reference_kernels": runs_reference})


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
    """Return the number of running requests, of all models."""
    return json_response({"server_load": sum(len(loaded.server.calls) for _, loaded in _table(request).loaded)})


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Return the metrics of the server and of all loaded models in Prometheus' text format."""
    text: bytes = _table(request).metrics.render() + request.app.state.http_metrics.render()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.post("/reset_prefix_cache", response_class=Response)
async def reset_prefix_cache(request: Request, model: str | None = None, reset_external: bool = False) -> Response:
    """Drop all cached prefixes, of one model or of all loaded ones."""
    table = _table(request)
    wanted = None if model is None else await table.find(model)
    chosen = (loaded for served, loaded in table.loaded if wanted in (None, served))
    await asyncio.gather(*(loaded.llm.reset_prefix_cache(reset_external) for loaded in chosen))
    return Response()


@router.post("/abort_requests", responses=answers(dict[str, int]), response_model=None)
async def abort_requests(body: AbortRequest, request: Request) -> Response:
    """Abort requests of the same API key, of any model. Their clients get the text generated so far."""
    owner = owner_of(request.scope)
    calls = [call for _, loaded in _table(request).loaded for call in loaded.server.calls_of(owner, body.request_ids)]
    for call in calls:
        call.abort()
    return json_response({"aborted": len(calls)})
