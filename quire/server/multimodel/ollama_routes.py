"""The lists of Ollama's API, over all models."""

import asyncio
import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.checkpoints.created import CreatedModel
from quire.checkpoints.errors import ModelNotFoundError, WeightError
from quire.checkpoints.hub import local_model
from quire.engine.frontend import Frontend
from quire.messages.errors import error_text
from quire.server.errors import ApiError, json_response
from quire.server.multimodel.engines import prepare
from quire.server.multimodel.served_model import ServedModel
from quire.server.multimodel.table import ModelTable
from quire.server.ollama.bodies import ANSWERS, OllamaRoute
from quire.server.ollama.facts import Facts, derived_digest, facts_of
from quire.server.ollama.models import NEVER, ShowRequest, description_of, list_entry, uses_gpu
from quire.server.ollama.state import LATEST, Library

router = APIRouter(route_class=OllamaRoute)


def _table(request: Request) -> ModelTable:
    table: ModelTable = request.app.state.table
    return table


def _facts(model: ServedModel) -> Facts:
    """Return the facts about a model, as far as its files are on this machine."""
    if model.facts is None:
        with contextlib.suppress(ModelNotFoundError, WeightError, ValueError, LookupError, OSError):
            directory = model.directory or local_model(model.declaration.model)
            if directory is not None:
                model.facts = facts_of(Path(directory), model.declaration.engine_config().model)
    unknown = Facts({"parent_model": "", "format": "", "family": ""}, 0, "", "1970-01-01T00:00:00+00:00", {}, {}, "")
    return model.facts or unknown


def _entries(model: ServedModel, created: dict[str, CreatedModel]) -> Iterator[dict[str, Any]]:
    """Yield the entries of a model, its adapters, and models created from it."""
    facts = _facts(model)
    for name in model.names:
        is_adapter = name not in model.declaration.owned_names
        digest = derived_digest(facts.digest, name) if is_adapter else facts.digest
        details = {**facts.details, "parent_model": model.name} if is_adapter else facts.details
        yield list_entry(name, facts.size, facts.modified_at, digest, details)
    for derived in created.values():
        if derived.base == model.canonical:
            changed = datetime.fromtimestamp(derived.created, UTC).isoformat()
            digest = derived_digest(facts.digest, msgspec.to_builtins(derived))
            details = {**facts.details, "parent_model": derived.source}
            yield list_entry(derived.name, facts.size, changed, digest, details)


@router.get("/api/tags", responses=ANSWERS, response_model=None)
@router.head("/api/tags", include_in_schema=False)
async def list_models(request: Request) -> Response:
    """List the models of the server, their adapters, and models created from them."""
    table = _table(request)
    library: Library = request.app.state.ollama
    await table.refresh()

    def entries() -> list[dict[str, Any]]:
        created = library.library.all()
        return [entry for model in table.models for entry in _entries(model, created)]

    return json_response({"models": await asyncio.to_thread(entries)})


@router.post("/api/show", responses=ANSWERS, response_model=None)
async def show(body: ShowRequest, request: Request) -> Response:
    """Describe a model. It is not loaded for that."""
    table = _table(request)
    library: Library = request.app.state.ollama
    name = body.given.removesuffix(LATEST)
    created = None if table.get(body.given) else (await asyncio.to_thread(library.library.all)).get(name)
    model = None if created is None else table.of_path(created.base)
    if model is None:
        created = None
        model = table.get(body.given) or await table.find(name or None)
    if model.loaded is not None:
        frontend = model.loaded.llm.frontend
        tool_parser = model.loaded.server.tool_parser
    else:
        frontend = await asyncio.to_thread(_frontend, model)
        tool_parser = model.declaration.server.get("tool_call_parser") or frontend.recognized_tools
    facts = await asyncio.to_thread(_facts, model)
    shown = body.given or model.name
    return json_response(description_of(frontend, tool_parser, facts, shown, created, bool(body.verbose)))


def _frontend(model: ServedModel) -> Frontend:
    """Raises ApiError if the model cannot be described."""
    try:
        return Frontend(*prepare(model.declaration, weights=False), in_process=False)
    except (ValueError, LookupError, OSError) as error:
        message = f"the model {model.name!r} cannot be read: {error_text(error)}"
        raise ApiError(500, message, param="model", code="model_load_failed") from error


@router.get("/api/ps", responses=ANSWERS, response_model=None)
async def list_loaded(request: Request) -> Response:
    """List the models in memory, with the memory that is reserved for each of them."""
    models = []
    for model, loaded in _table(request).loaded:
        facts = await asyncio.to_thread(_facts, model)
        expires = model.expires_at
        state = {
            "size": model.memory,
            "size_vram": model.memory if uses_gpu(loaded.server) else 0,
            "expires_at": NEVER if expires is None else datetime.fromtimestamp(expires, UTC).isoformat(),
            "context_length": loaded.llm.max_model_len,
        }
        models.append({**list_entry(model.name, 0, facts.modified_at, facts.digest, facts.details), **state})
    return json_response({"models": models})
