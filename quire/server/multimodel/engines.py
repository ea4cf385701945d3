"""The engine and the app of a loaded model."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from fastapi import FastAPI

from quire.config.engine import EngineConfig, ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.core_client import CoreClient, CoreState
from quire.models.heads.resolve import with_files
from quire.server.app import Shared, model_app
from quire.server.generation import Server
from quire.server.http_server import create_llm
from quire.server.keep_alive import Residence
from quire.server.multimodel.declarations import ModelDeclaration


@dataclass(frozen=True)
class LoadedModel:
    """llm: the running engine. app: the model's API."""

    llm: AsyncLLM
    app: FastAPI

    @property
    def server(self) -> Server:
        server: Server = self.app.state.server
        return server

    @property
    def has_failed(self) -> bool:
        """Whether the engine has failed permanently."""
        return self.llm.client.state is CoreState.DEAD

    @property
    def memory(self) -> int:
        """The bytes that the processes of the engine use."""
        try:
            return sum(process.memory_info().rss for process in self._processes())
        except psutil.NoSuchProcess:  # one has just ended; it is replaced
            return 0

    def _processes(self) -> Iterator[psutil.Process]:
        for pid in self.llm.client.process_ids:
            if pid is not None:
                core = psutil.Process(pid)
                yield from (core, *core.children(recursive=True))

    async def close(self) -> None:
        await self.llm.shutdown()


def prepare(declaration: ModelDeclaration, weights: bool = True) -> tuple[EngineConfig, Path]:
    """Find the files of a model, or download them. weights: False downloads no tensors. Raises ConfigError,
    ModelNotFoundError or OSError."""
    return with_files(declaration.engine_config(), weights)


async def load(
    declaration: ModelDeclaration, config: EngineConfig, directory: Path, shared: Shared, residence: Residence
) -> LoadedModel:
    """Start the engine of a model, and build its app. Raises ConfigError, OSError or EngineDeadError."""
    options = server_config(declaration, shared.config)
    # In a thread, since the tokenizer of a model may take a second to load.
    building = asyncio.create_task(asyncio.to_thread(_build, config, directory, options, shared, residence))
    try:
        loaded = await asyncio.shield(building)
    except asyncio.CancelledError:
        loaded = await building
        await loaded.close()
        raise
    try:
        await loaded.llm.start()
        await loaded.server.adapters.start()
    except BaseException:
        await loaded.close()
        raise
    return loaded


def server_config(declaration: ModelDeclaration, config: ServerConfig) -> ServerConfig:
    """Return the server's options for one of its models."""
    one = {"models": None, "models_dir": None, "pulled_models": False, "served_model_name": declaration.owned_names}
    return replace(config, **{**one, **declaration.server})


def _build(
    config: EngineConfig, directory: Path, options: ServerConfig, shared: Shared, residence: Residence
) -> LoadedModel:
    core = CoreClient(config, directory)
    try:
        llm, names = create_llm(core, options)
        return LoadedModel(llm, model_app(llm, shared, options, names, residence))
    except BaseException:
        core.kill()
        raise
