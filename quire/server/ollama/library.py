"""Ollama's API: POST /api/pull, /api/push, /api/copy and /api/create, and DELETE /api/delete.

They need --enable-admin-api.
"""

import asyncio
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from quire.checkpoints.created import CreatedModel
from quire.checkpoints.errors import ModelNotFoundError, WeightError
from quire.config.engine import ConfigError, ModelConfig
from quire.messages.errors import error_text
from quire.models.description import describe
from quire.observability.logging import logger
from quire.server.control import check_allowed
from quire.server.errors import ApiError
from quire.server.fields import TABLES, Strings
from quire.server.generation import Server
from quire.server.ollama.blobs import checked_digest
from quire.server.ollama.bodies import ANSWERS, NamedModel, OllamaRoute
from quire.server.ollama.generate import OllamaChatRequest
from quire.server.ollama.lines import Line, LineStream, progress
from quire.server.ollama.messages import OllamaMessages
from quire.server.ollama.state import LATEST, Library, State
from quire.server.ollama.templates import GO_TEMPLATE, is_go_template
from quire.server.protocol import Body
from quire.server.routing import stream_answers

_STREAM = stream_answers(dict[str, Any], dict[str, str], LineStream.media_type)
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:\w[\w.-]*)?")
_MOST_NAME = 200  # characters; file names must have room for it
_HUB = re.compile(r"^(https?://)?(hf\.co|huggingface\.co)/")


class LibraryRoute(OllamaRoute):
    """Errors of /api/create name fields without the prefix `options`."""

    names = {theirs: name.replace("options.", "parameters.") for theirs, name in OllamaRoute.names.items()}  # noqa: RUF012


router = APIRouter(route_class=LibraryRoute)
derived = APIRouter(route_class=LibraryRoute)  # need the model that a new one is derived from


class PullRequest(NamedModel):
    stream: bool | None = Field(None, description="Default: true.")
    insecure: bool | None = Field(None, description="Without effect: HF_ENDPOINT says where the hub is.")


class DeleteRequest(NamedModel):
    pass


class CopyRequest(Body):
    source: str
    destination: str


class CreateRequest(NamedModel):
    from_: str | None = Field(None, alias="from", description="The served model, or one created from it.")
    files: dict[str, str] | None = Field(None, description="The name of one GGUF file, and its uploaded digest.")
    template: str | None = Field(None, description="A Jinja template.")
    system: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="Defaults of options.")
    messages: OllamaMessages | None = Field(None, description="With which each conversation begins.")
    license: str | Strings | None = None
    stream: bool | None = Field(None, description="Default: true.")

    def unsupported(self) -> tuple[str, str] | None:
        given = self.model_extra or {}
        refused = TABLES["ollama"]["create_refused"]
        if self.template and is_go_template(self.template):
            return "template", GO_TEMPLATE
        return next(((name, why) for name, why in refused.items() if given.get(name)), None)


def _name(given: str | None, field: str = "model") -> str:
    """Return a model's name without the tag `latest`. Raises ApiError."""
    name = (given or "").removesuffix(LATEST)
    if len(name) > _MOST_NAME or not _NAME.fullmatch(name):
        message = f"{field} should be a name such as owner/model:tag, got {(given or '')[:_MOST_NAME]!r}"
        raise ApiError(400, message, param=field)
    return name


@router.post("/api/pull", responses=_STREAM, response_model=None)
async def pull(body: PullRequest, request: Request) -> Response:
    """Download a model from the Hugging Face hub, by its name there or by a short name. It can be served later."""
    check_allowed(request)
    state: Library = request.app.state.ollama
    return await progress(request, state.downloads.pull(_name(_HUB.sub("", body.given))), body.stream)


@router.post("/api/push", responses=ANSWERS, response_model=None)
async def push(body: NamedModel, request: Request) -> Response:
    """Reject every push."""
    check_allowed(request)
    raise ApiError(400, "push is not supported: Quire uploads no models; the command hf upload does", param="model")


@router.delete("/api/delete", responses=ANSWERS, response_class=Response)
async def delete(body: DeleteRequest, request: Request) -> Response:
    """Delete a created model, or a model in the hub's cache that is not being served."""
    check_allowed(request)
    state: Library = request.app.state.ollama
    name = _name(_HUB.sub("", body.given))
    created = state.library.all().get(name)
    if created is not None and created.base is not None and state.is_file_of_served(Path(created.base)):
        raise ApiError(409, f"{name!r} is being served, so it is not deleted", param="model")
    if created is not None:
        state.library.delete(name)
        logger.info("Deleted the created model %s for a client", name)
        return Response()
    if state.is_served(name):
        raise ApiError(409, f"{name!r} is being served, so it is not deleted", param="model")
    try:
        found = (await state.downloads.output_of("rm", "--dry-run", name)).split()[0]
    except ApiError as error:
        error.status_code = 404
        raise
    if state.is_repository_of_served(found):
        raise ApiError(409, f"{name!r} is being served, so it is not deleted", param="model")
    await state.downloads.output_of("rm", "--yes", found)
    logger.info("Deleted %s from the cache for a client", found)
    return Response()


@derived.post("/api/copy", responses=ANSWERS, response_class=Response)
async def copy(body: CopyRequest, request: Request) -> Response:
    """Give the served model or a created model another name."""
    check_allowed(request)
    source = _source(body.source, request, "source")
    name = _new_name(body.destination, request, "destination")
    state: State = request.app.state.ollama
    state.library.write(msgspec.structs.replace(source, name=name))
    return Response()


@derived.post("/api/create", responses=_STREAM, response_model=None)
async def create(body: CreateRequest, request: Request) -> Response:
    """Create a model from the served model with different defaults, or from an uploaded GGUF file."""
    check_allowed(request)
    server: Server = request.app.state.server
    if refused := body.unsupported():
        field, why = refused
        raise ApiError(400, f"{field} {why}", param=field, code="unsupported_parameter")
    name = _new_name(body.given, request, "model")
    if (body.from_ is None) is (not body.files):
        raise ApiError(400, "one of from and files is needed", param="from")
    if body.from_ is not None:
        source = _source(body.from_, request, "from")
    else:
        source = await _of_file(body.files or {}, request)
    await _check_defaults(body, server, request, is_served=body.from_ is not None)
    licenses = [body.license] if isinstance(body.license, str) else body.license or []
    messages = None if body.messages is None else [m.model_dump(exclude_none=True) for m in body.messages]
    created = CreatedModel(
        name,
        source.base,
        source.source,
        template=body.template or source.template,
        system=body.system or source.system,
        parameters={**source.parameters, **(body.parameters or {})},
        messages=source.messages if messages is None else messages,
        license="\n".join(licenses) or source.license,
    )
    return await progress(request, _steps(created, request), body.stream)


async def _steps(created: CreatedModel, request: Request) -> AsyncGenerator[Line]:
    state: State = request.app.state.ollama
    yield {"status": "writing manifest"}
    state.library.write(created)
    logger.info("Created the model %s from %s for a client", created.name, created.source)
    yield {"status": "success"}


def _new_name(given: str, request: Request, field: str) -> str:
    """Raises ApiError for a name that a served model or an adapter has."""
    server: Server = request.app.state.server
    name = _name(given, field)
    if name in server.names and name not in request.app.state.ollama.library.all():
        raise ApiError(409, f"{field}: the name {name!r} is taken", param=field)
    return name


def _source(given: str, request: Request, field: str) -> CreatedModel:
    """Return the settings that a new model inherits from the served model or from a created one. Raises ApiError."""
    server: Server = request.app.state.server
    state: State = request.app.state.ollama
    name = given.removesuffix(LATEST)
    if (created := state.library.all().get(name)) is not None:
        return msgspec.structs.replace(created, source=name)
    if given in server.model_names or name in server.model_names:
        return CreatedModel(name, state.base, name)
    message = f"{field}: {given[:_MOST_NAME]!r} is neither the served model nor one that was created"
    raise ApiError(404, message, param=field, code="model_not_found")


async def _of_file(files: dict[str, str], request: Request) -> CreatedModel:
    """Create a model from an uploaded file. Raises ApiError if Quire cannot run it."""
    state: State = request.app.state.ollama
    [(file, digest), *others] = files.items()
    if others or not file.lower().endswith(".gguf"):
        raise ApiError(400, "files should be one GGUF file; quire serve takes other checkpoints", param="files")
    path = state.library.blob(checked_digest(digest, "files"))
    if not path.exists():
        raise ApiError(400, f"files: {file[:100]!r} has not been uploaded to /api/blobs/{digest}", param="files")
    try:
        await asyncio.to_thread(describe, path, ModelConfig())
    except (ConfigError, ModelNotFoundError, WeightError, ValueError, LookupError) as error:
        raise ApiError(400, f"files: Quire cannot run {file[:100]!r}: {error_text(error)}", param="files") from error
    return CreatedModel("", str(path), file)


async def _check_defaults(body: CreateRequest, server: Server, request: Request, is_served: bool) -> None:
    """Check the defaults: render a conversation with the template, and read the parameters. Raises ApiError."""
    user = {"role": "user", "content": "Hello"}
    system = [{"role": "system", "content": body.system}] if body.system else []
    begun = [] if body.messages is None else [m.model_dump() for m in body.messages]
    chat = OllamaChatRequest.model_validate({"messages": [*system, *begun, user], "options": body.parameters}).chat(
        body.template
    )
    chat.trust_template()
    if body.template or is_served:
        await server.render(chat.messages, chat, request.state.body)
