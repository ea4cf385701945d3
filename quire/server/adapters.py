"""The adapters of a server: models with their own names, which can be loaded and unloaded while it runs."""

import asyncio
import json
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import PlainTextResponse, Response

from quire.config.engine import ConfigError, ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.messages.errors import error_text
from quire.messages.lora import Adapter, LoRARequest
from quire.observability.logging import logger
from quire.platform.untrusted.limits import BusyError
from quire.server.errors import ApiError
from quire.server.fields import Name, check_name
from quire.server.folders import folder_below
from quire.server.routing import Answers, StrictRoute, answers

router = APIRouter(route_class=StrictRoute)
_DONE: Answers = {**answers(str), 200: {"description": "Done", "content": {"text/plain": {}}}}


@dataclass(frozen=True)
class ServedAdapter:
    """parent: the name of the base model."""

    adapter: Adapter
    parent: str


class Adapters:
    """The served adapters by name."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig, model_names: list[str]) -> None:
        self._llm = llm
        self._config = config
        self._model_names = model_names
        self.by_name: dict[str, ServedAdapter] = {}
        self._changing = asyncio.Lock()

    def get(self, name: str) -> Adapter | None:
        served = self.by_name.get(name)
        return None if served is None else served.adapter

    async def start(self) -> None:
        """Load the adapters named by the option lora_modules. Raises ConfigError."""
        for module in self._config.lora_modules:
            request = read_module(module)
            try:
                check_name(request.lora_name)
            except ValueError as error:
                raise ConfigError(f"lora_modules: {request.lora_name[:200]!r}: {error_text(error)}") from error
            if request.lora_name in (*self._model_names, *self.by_name):
                raise ConfigError(f"lora_modules: the name {request.lora_name!r} is taken")
            try:
                await self._add(request)
            except (ValueError, OSError, BusyError) as error:
                raise ConfigError(f"lora_modules: {request.lora_name}: {error_text(error)}") from error

    async def load(self, name: str, path: str, in_place: bool) -> None:
        """Load an adapter from a folder below `lora_folder`. Raises ApiError, or BusyError, which is a 503."""
        self._check_allowed()
        if name in self._model_names:
            raise ApiError(400, f"{name[:200]!r} is the name of the model", param="lora_name")
        directory = folder_below(self._config.lora_folder or "", path, "--lora-folder", "lora_path")
        async with self._changing:
            if name in self.by_name and not in_place:
                message = (
                    f"The lora adapter '{name[:200]}' has already been loaded. If you want to load the adapter in "
                    "place, set 'load_inplace' to True."
                )
                raise ApiError(400, message, param="lora_name")
            try:
                await self._add(LoRARequest(name, lora_path=str(directory)))
            except (ValueError, OSError) as error:
                raise ApiError(400, error_text(error), param="lora_path") from error

    def unload(self, name: str) -> None:
        """Remove an adapter's name. Running requests finish with the adapter. Raises ApiError."""
        self._check_allowed()
        if self.by_name.pop(name, None) is None:
            message = f"The lora adapter '{name[:200]}' cannot be found."
            raise ApiError(404, message, param="lora_name", code="not_found")

    async def _add(self, request: LoRARequest) -> None:
        adapter = await self._llm.add_lora(request)
        parent = request.base_model_name or self._model_names[0]
        self.by_name[request.lora_name] = ServedAdapter(adapter, parent)
        logger.info("Adapter %s: loaded from %s", adapter.name, adapter.path)

    def _check_allowed(self) -> None:
        if not self._config.enable_admin_api or not self._config.lora_folder:
            message = "this server does not load adapters for clients; start it with --enable-admin-api --lora-folder"
            raise ApiError(403, message, code="not_allowed")
        if not self._llm.config.lora.enable_lora:
            raise ApiError(403, "this server takes no adapters; start it with --enable-lora", code="not_allowed")


def read_module(text: str) -> LoRARequest:
    """Parse an item of lora_modules: name=path, or a JSON object with name, path and optionally base_model_name."""
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
            names = {"lora_name": fields["name"], "lora_path": fields["path"]}
            return msgspec.convert({**names, "base_model_name": fields.get("base_model_name")}, LoRARequest)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"lora_modules: {text!r} needs the fields name and path, two strings, as JSON") from error
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"lora_modules: {text!r} should be name=path")
    return LoRARequest(name, 1, path)


class LoadAdapterRequest(BaseModel):
    lora_name: Name = Field(description="The name under which requests use it as their model.")
    lora_path: str = Field(min_length=1, description="Its folder, below the one of --lora-folder.")
    load_inplace: bool = Field(False, description="Replace an adapter of this name.")


class UnloadAdapterRequest(BaseModel):
    lora_name: Name
    lora_int_id: int | None = Field(None, description="Ignored.")


@router.post("/v1/load_lora_adapter", responses=_DONE, response_class=Response)
async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> Response:
    """Load an adapter. Respond when requests can use it."""
    await request.app.state.server.adapters.load(body.lora_name, body.lora_path, body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", responses=_DONE, response_class=Response)
async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
    """Unload an adapter. Running requests finish with it."""
    request.app.state.server.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
