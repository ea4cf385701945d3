"""Routes that pause the engine, put it to sleep, replace its weights, and profile it. They need --enable-admin-api."""

import re
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from quire.config.engine import ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.messages.changes import WEIGHT_GROUP, PauseMode
from quire.messages.errors import error_text
from quire.server.errors import ApiError, json_response
from quire.server.fields import Name
from quire.server.folders import folder_below
from quire.server.generation import Server
from quire.server.routing import Answers, StrictRoute, answers


def check_allowed(request: Request) -> None:
    """Raises ApiError."""
    check_admin(request.app.state.config)


def check_admin(config: ServerConfig) -> None:
    """Raises ApiError."""
    if not config.enable_admin_api:
        raise ApiError(403, "this endpoint needs a server that was started with --enable-admin-api", code="not_allowed")


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
    """Stop computing until /resume. Responds when nothing runs any more; new requests wait.

    mode: unfinished requests end with their output so far (abort), finish first (wait), or continue after /resume
    (keep).
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
    """Pause, and free the memory of the KV cache and the weights. level 1 keeps the weights in host memory; level 2
    drops them."""
    try:
        await _llm(request).sleep(level, mode)
    except ValueError as error:
        raise _bad(error) from error
    return Response()


@router.post("/wake_up", responses=_DONE, response_class=Response)
async def wake_up(request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
    """Allocate memory again for `weights`, `kv_cache` or (without tags) both. Requests run once both are allocated."""
    try:
        await _llm(request).wake_up(tags)
    except ValueError as error:
        raise _bad(error) from error
    return Response()


@router.get("/is_sleeping", responses=answers(dict[str, bool]), response_model=None)
async def is_sleeping(request: Request) -> Response:
    return json_response({"is_sleeping": await _llm(request).is_sleeping()})


@router.post("/start_profile", responses=answers(dict[str, str]), response_model=None)
async def start_profile(request: Request, profile_prefix: str | None = None) -> Response:
    """Profile the steps of all cores with the settings of --profiler-config, until /stop_profile. profile_prefix:
    prefix of the trace names."""
    try:
        await _llm(request).start_profile(profile_prefix)
    except ValueError as error:
        raise _bad(error) from error
    return json_response({"status": "profiling"})


@router.post("/stop_profile", responses=answers(dict[str, str | int]), response_model=None)
async def stop_profile(request: Request) -> Response:
    """Write the traces, and respond when they are complete. Requests wait until then. cores: the number of profiled
    cores."""
    try:
        cores = await _llm(request).stop_profile()
    except ValueError as error:
        raise _bad(error) from error
    return json_response({"status": "stopped", "cores": cores})


class InitGroupRequest(BaseModel):
    master_address: str = Field(description="The IP address of the trainer, which is rank 0 and has the TCPStore.")
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(1, ge=1, lt=1 << 31, description="The number of the engine's first rank in the group.")
    world_size: int = Field(
        ge=2, lt=1 << 31, description="The number of ranks in the group: the trainer's and the engines'."
    )
    group_name: Name = WEIGHT_GROUP
    backend: Literal["gloo", "nccl"] | None = Field(
        None, description="nccl on GPUs and gloo on CPUs, if it is left out."
    )
    timeout: float = Field(60.0, gt=0, le=3600, description="Seconds for joining, and for each tensor later.")


class DestroyGroupRequest(BaseModel):
    group_name: Name = WEIGHT_GROUP


class UpdateWeightsRequest(BaseModel):
    """New weights: a folder, or tensors that rank 0 of a process group broadcasts in the order of their names."""

    path: str | None = Field(
        None, min_length=1, description="A folder with safetensors files, below the one of --weights-folder."
    )
    names: list[str] | None = Field(None, min_length=1, description="Of tensors, as in the model's checkpoint.")
    dtypes: list[str] = Field([], description="Of the tensors: float32, float16, bfloat16 or float64.")
    shapes: list[list[Annotated[int, Field(ge=0, lt=1 << 63)]]] = Field(
        [], description="Of the whole tensors, as in the model's checkpoint."
    )
    group_name: Name = WEIGHT_GROUP
    last: bool = Field(True, description="Whether all tensors have come. Otherwise they are kept for the next call.")
    flush_cache: bool = Field(True, description="Without effect: new weights always invalidate the cache.")

    @model_validator(mode="before")
    @classmethod
    def _one_source(cls, data: Any) -> Any:
        if isinstance(data, dict) and (data.get("path") is None) == (data.get("names") is None):
            raise ValueError("give either path or names")
        return data


@router.post("/update_weights", responses=answers(dict[str, str]), response_model=None)
async def update_weights(body: UpdateWeightsRequest, request: Request) -> Response:
    """Replace the model's weights. Requests wait, then continue with the new weights; the cache is invalidated."""
    check_allowed(request)
    if body.names is not None:
        try:
            await _llm(request).update_weights_from_distributed(
                body.names, body.dtypes, body.shapes, group_name=body.group_name, last=body.last
            )
        except ValueError as error:
            raise _bad_field(error, body) from error
        return json_response({"status": "updated" if body.last else "received"})
    root = cast(Server, request.app.state.server).config.weights_folder
    if root is None:
        raise ApiError(403, "this server takes no weights; start it with --weights-folder", code="not_allowed")
    folder = folder_below(root, body.path or "", "--weights-folder", "path")
    try:
        await _llm(request).update_weights(str(folder))
    except ValueError as error:
        raise ApiError(400, error_text(error), param="path") from error
    return json_response({"status": "updated"})


@router.post("/init_weights_update_group", responses=answers(dict[str, str]), response_model=None)
async def init_weights_update_group(body: InitGroupRequest, request: Request) -> Response:
    """Join the process group of a trainer, which then sends weights through /update_weights. Responds when all members
    have joined; requests keep running."""
    check_allowed(request)
    try:
        await _llm(request).init_weights_update_group(**body.model_dump())
    except ValueError as error:
        raise _bad_field(error, body) from error
    return json_response({"status": "joined"})


@router.post("/destroy_weights_update_group", responses=answers(dict[str, str]), response_model=None)
async def destroy_weights_update_group(body: DestroyGroupRequest, request: Request) -> Response:
    check_allowed(request)
    await _llm(request).destroy_weights_update_group(body.group_name)
    return json_response({"status": "destroyed"})


def _bad_field(error: ValueError, body: BaseModel) -> ApiError:
    """Convert the error. Its message begins with the name of the invalid field, if there is one."""
    text = error_text(error)
    field = re.split(r"\W", text, maxsplit=1)[0]
    return ApiError(400, text, param=field if field in type(body).model_fields else None)
