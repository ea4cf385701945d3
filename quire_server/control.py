"""Routes that pause the engine, have it sleep, and replace its weights. Only with --enable-admin-api."""

from typing import Annotated, cast

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from quire.engine.async_llm import AsyncLLM
from quire.messages.changes import PauseMode
from quire.messages.errors import error_text
from quire_server.errors import ApiError, json_response
from quire_server.folders import folder_below
from quire_server.generation import Server
from quire_server.routing import Answers, StrictRoute, answers


def check_allowed(request: Request) -> None:
    """Raises ApiError."""
    server: Server = request.app.state.server
    if not server.config.enable_admin_api:
        raise ApiError(403, "this server takes no such orders; start it with --enable-admin-api", code="not_allowed")


router = APIRouter(route_class=StrictRoute, dependencies=[Depends(check_allowed)])
_DONE: Answers = {**answers(str), 200: {"description": "Done", "content": {}}}


def _llm(request: Request) -> AsyncLLM:
    return cast(Server, request.app.state.server).llm


def _bad(error: ValueError) -> ApiError:
    return ApiError(400, error_text(error))


@router.post("/pause", responses=answers(dict[str, str]), response_model=None)
async def pause(
    request: Request, mode: PauseMode = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
) -> Response:
    """Compute nothing until /resume. Answers when nothing runs any more; requests that come wait.

    mode: unfinished requests end with what they have (abort), finish before (wait), or go on after /resume (keep).
    """
    await _llm(request).pause_generation(
        mode=mode, wait_for_inflight_requests=wait_for_inflight_requests, clear_cache=clear_cache
    )
    return json_response({"status": "paused"})


@router.post("/resume", responses=answers(dict[str, str]), response_model=None)
async def resume(request: Request) -> Response:
    try:
        await _llm(request).resume_generation()
    except ValueError as error:
        raise _bad(error) from error
    return json_response({"status": "resumed"})


@router.get("/is_paused", responses=answers(dict[str, bool]), response_model=None)
async def is_paused(request: Request) -> Response:
    return json_response({"is_paused": await _llm(request).is_paused()})


@router.post("/sleep", responses=_DONE, response_class=Response)
async def sleep(request: Request, level: int = 1, mode: PauseMode = "abort") -> Response:
    """Pause, and give back the memory of the KV cache and the weights. level 1 keeps the weights in the host's memory;
    level 2 drops them."""
    try:
        await _llm(request).sleep(level, mode)
    except ValueError as error:
        raise _bad(error) from error
    return Response()


@router.post("/wake_up", responses=_DONE, response_class=Response)
async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
    """Take memory again for `weights`, `kv_cache` or (without tags) both. Requests run when both are there."""
    try:
        await _llm(request).wake_up(tags)
    except ValueError as error:
        raise _bad(error) from error
    return Response()


@router.get("/is_sleeping", responses=answers(dict[str, bool]), response_model=None)
async def is_sleeping(request: Request) -> Response:
    return json_response({"is_sleeping": await _llm(request).is_sleeping()})


class UpdateWeightsRequest(BaseModel):
    path: str = Field(min_length=1, description="A folder with safetensors files, below the one of --weights-folder.")


@router.post("/update_weights", responses=answers(dict[str, str]), response_model=None)
async def update_weights(body: UpdateWeightsRequest, request: Request) -> Response:
    """Replace the model's weights. Requests wait meanwhile, and go on with the new ones; the cache is invalidated."""
    check_allowed(request)
    root = cast(Server, request.app.state.server).config.weights_folder
    if root is None:
        raise ApiError(403, "this server takes no weights; start it with --weights-folder", code="not_allowed")
    folder = folder_below(root, body.path, "--weights-folder", "path")
    try:
        await _llm(request).update_weights(str(folder))
    except ValueError as error:
        raise ApiError(400, error_text(error), param="path") from error
    return json_response({"status": "updated"})
