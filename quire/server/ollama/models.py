"""Ollama's API: GET /api/tags, /api/ps and /api/version, and POST /api/show."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from quire.checkpoints.created import CreatedModel
from quire.engine.frontend import Frontend
from quire.platform.limits import has_gpu_driver
from quire.server.errors import json_response
from quire.server.fill_in_middle import FillInMiddle
from quire.server.generation import Server
from quire.server.ollama.bodies import ANSWERS, OPTIONS, NamedModel, OllamaRoute
from quire.server.ollama.facts import Facts, as_lists, derived_digest
from quire.server.ollama.state import LATEST, State

VERSION = "0.12.11"  # the Ollama version of this API; clients query it to detect features
NEVER = "9999-12-31T23:59:59Z"
_RECOMMENDED = {"max_new_tokens": "num_predict", **{name: option for option, name in OPTIONS.items()}}

router = APIRouter(route_class=OllamaRoute)
lists = APIRouter(route_class=OllamaRoute)  # of all models
about = APIRouter(route_class=OllamaRoute)  # about the server
heartbeat = APIRouter(include_in_schema=False)  # for a server without a page


class ShowRequest(NamedModel):
    verbose: bool | None = Field(None, description="With the lists of a GGUF file, such as its vocabulary.")


@heartbeat.api_route("/", methods=["GET", "HEAD"])
async def is_running() -> Response:
    return PlainTextResponse("Quire is running")


@lists.get("/api/tags", responses=ANSWERS, response_model=None)
@lists.head("/api/tags", include_in_schema=False)
async def list_models(request: Request) -> Response:
    """List the usable models: the served model, its adapters, and models created from it."""
    return json_response({"models": list(_cards(request, await _facts(request)))})


@lists.get("/api/ps", responses=ANSWERS, response_model=None)
async def list_loaded(request: Request) -> Response:
    """List the same models with their memory use. The list is empty while the engine sleeps."""
    server: Server = request.app.state.server
    if not await server.keep_alive.is_loaded():
        return json_response({"models": []})
    expires = server.keep_alive.expires_at
    on_gpu = uses_gpu(server)
    state = {
        "expires_at": NEVER if expires is None else datetime.fromtimestamp(expires, UTC).isoformat(),
        "context_length": server.llm.max_model_len,
    }
    models = [
        {**card, **state, "size_vram": card["size"] if on_gpu else 0} for card in _cards(request, await _facts(request))
    ]
    return json_response({"models": models})


def uses_gpu(server: Server) -> bool:
    device = server.llm.config.kernels.device
    return has_gpu_driver() if device == "auto" else device == "cuda"


async def _facts(request: Request) -> Facts:
    state: State = request.app.state.ollama
    return await state.facts()


def _cards(request: Request, facts: Facts) -> Iterator[dict[str, Any]]:
    server: Server = request.app.state.server
    state: State = request.app.state.ollama
    created = state.usable
    for name in server.names:
        if name in created:
            continue
        adapter = server.adapters.by_name.get(name)
        details = facts.details
        digest = facts.digest
        if adapter is not None:
            details = {**details, "parent_model": adapter.parent}
            digest = derived_digest(digest, adapter.adapter.path)
        yield list_entry(name, facts.size, facts.modified_at, digest, details)
    for model in created.values():
        changed = datetime.fromtimestamp(model.created, UTC).isoformat()
        digest = derived_digest(facts.digest, msgspec.to_builtins(model))
        yield list_entry(model.name, facts.size, changed, digest, {**facts.details, "parent_model": model.source})


def list_entry(name: str, size: int, modified_at: str, digest: str, details: dict[str, Any]) -> dict[str, Any]:
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}{LATEST}"
    head = {"name": tagged, "model": tagged, "modified_at": modified_at, "size": size}
    return {**head, "digest": digest, "details": details}


@router.post("/api/show", responses=ANSWERS, response_model=None)
async def show(body: ShowRequest, request: Request) -> Response:
    server: Server = request.app.state.server
    name = body.accepted(request)
    facts = await _facts(request)
    return json_response(
        description_of(server.llm.frontend, server.tool_parser, facts, name, body.created, bool(body.verbose))
    )


def description_of(
    frontend: Frontend, tool_parser: str | None, facts: Facts, name: str, created: CreatedModel | None, verbose: bool
) -> dict[str, Any]:
    """Return the answer of /api/show. created: the created model of this name, if it is one."""
    template = (created and created.template) or frontend.given_chat_template or frontend.tokenizer.chat_template or ""
    recommended = frontend.processor.generation_config
    parameters = {_RECOMMENDED[field]: value for field, value in recommended.items() if field in _RECOMMENDED}
    description: dict[str, Any] = {
        "license": facts.license,
        "template": template,
        "details": facts.details,
        "model_info": {**facts.model_info, **(as_lists(facts.lists) if verbose else {})},
        "capabilities": _capabilities(frontend, tool_parser),
        "modified_at": facts.modified_at,
    }
    if created is not None:
        parameters |= created.parameters
        description |= {
            "license": created.license or facts.license,
            "details": {**facts.details, "parent_model": created.source},
            "system": created.system or "",
            "messages": created.messages,
            "modified_at": datetime.fromtimestamp(created.created, UTC).isoformat(),
        }
    description["parameters"] = "\n".join(f"{option:<30} {text}" for option, text in _texts(parameters))
    source = name if created is None else created.source
    description["modelfile"] = _modelfile(source, description, parameters)
    return description


def _capabilities(frontend: Frontend, tool_parser: str | None) -> list[str]:
    media = frontend.processor.media
    found = {
        "completion": frontend.processor.generates,
        "embedding": frontend.pooling is not None and "embed" in frontend.pooling.description.tasks,
        "vision": media is not None and "image" in media.placeholders,
        "insert": FillInMiddle.of(frontend.tokenizer),
        "tools": tool_parser,
        "thinking": frontend.reasoning,
    }
    return [name for name, value in found.items() if value]


def _texts(parameters: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value in Modelfile format; one pair for each item of a list."""
    for option, value in parameters.items():
        for item in value if isinstance(value, list) else [value]:
            yield option, msgspec.json.encode(item).decode()


def _modelfile(source: str, description: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """Return the description as a Modelfile. Its template is a Jinja template."""
    lines = ["# Generated by Quire. The template is a Jinja template.", f"FROM {source}"]
    lines += [f'{kind.upper()} """{description[kind]}"""' for kind in ("template", "system") if description.get(kind)]
    lines += [f"PARAMETER {option} {text}" for option, text in _texts(parameters)]
    lines += [f"MESSAGE {message['role']} {message.get('content', '')}" for message in description.get("messages", ())]
    if description["license"]:
        lines.append(f'LICENSE """{description["license"]}"""')
    return "\n".join(lines)


@about.get("/api/version", responses=ANSWERS, response_model=None)
@about.head("/api/version", include_in_schema=False)
async def ollama_version() -> Response:
    return json_response({"version": VERSION})
