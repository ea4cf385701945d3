"""`quire serve` with several models."""

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from fastapi import FastAPI

from quire.config.engine import ModelConfig, ServerConfig
from quire.observability.logging import logger
from quire.semantic.router import SemanticRouter
from quire.semantic.rules import Rules
from quire.server.app import Shared
from quire.server.draining import DrainingServer, loop_factory
from quire.server.errors import ApiError
from quire.server.listening import listening_socket, raise_descriptor_limit
from quire.server.multimodel.app import create_front_app
from quire.server.multimodel.declarations import ModelDeclaration
from quire.server.multimodel.memory import Machine, gib
from quire.server.multimodel.rules import RuledRequests
from quire.server.multimodel.table import ModelTable, Source


def serve_models(
    declarations: Sequence[ModelDeclaration],
    config: ServerConfig,
    machine: Machine,
    found: Source,
    options: ModelConfig,
) -> int:
    """Serve until a signal arrives. Returns the exit status. found: see ModelTable. options: where models are
    downloaded to. Raises ConfigError or OSError."""
    with contextlib.closing(listening_socket(config)) as listening:
        raise_descriptor_limit(0)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_serve(declarations, config, machine, found, options, listening))


async def _serve(
    declarations: Sequence[ModelDeclaration],
    config: ServerConfig,
    machine: Machine,
    found: Source,
    options: ModelConfig,
    listening: socket.socket,
) -> int:
    shared = Shared.create(config)
    table = ModelTable(declarations, machine, shared, found)
    tracing = semantic = None
    try:
        await table.refresh()
        if config.rules is not None:
            semantic = await SemanticRouter.start(Rules.read(Path(config.rules)))
        app = create_front_app(table, shared, options, None if semantic is None else RuledRequests(semantic))
        tracing = app.state.tracing
        table.start()
        await _Server(config, app, table, shared).serve(sockets=[listening])
        return 0
    finally:
        await table.close()
        if semantic is not None:
            await semantic.close()
        shared.responses.store.close()
        if tracing is not None:
            await tracing.close()


class _Server(DrainingServer):
    def __init__(self, config: ServerConfig, app: FastAPI, table: ModelTable, shared: Shared) -> None:
        self._app = app
        self._table = table
        self._shared = shared

        def say(url: str) -> None:
            page = "" if config.disable_ui else f", page {url}/"
            names = ", ".join(model.name for model in table.models) or "none yet"
            memory = gib(table.machine.memory)
            logger.info(
                f"Serving at {url}: models {names}, in up to {memory}, API {url}/v1, description {url}/docs{page}"
            )

        super().__init__(app, config, say)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._app.state.draining = True
        self._loop.call_soon_threadsafe(self._table.begin_to_end)

    def count_running(self) -> int:
        return len(self._shared.preparing) + sum(len(loaded.server.calls) for _, loaded in self._table.loaded)

    def has_background_work(self) -> bool:
        return bool(self._shared.responses.runs)

    def end_running(self) -> None:
        self._shared.preparing.fail(ApiError(503, "the server is shutting down", code="shutting_down"))
        for _, loaded in self._table.loaded:
            loaded.server.end_calls()
