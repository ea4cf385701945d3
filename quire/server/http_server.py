"""The HTTP side of `quire serve`: from loading the core to the end of the last response."""

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

from fastapi import FastAPI

from quire.config.engine import ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.core_client import CoreClient, CoreState
from quire.observability.logging import logger
from quire.server.app import create_app
from quire.server.draining import DrainingServer, loop_factory


def run(
    core: CoreClient, config: ServerConfig, listening: socket.socket, announce: Callable[[str], None] = logger.info
) -> int:
    """Build the server, wait for the cores, and serve until a signal. Returns the exit status.

    announce: called with the URL when the server is ready. Raises ConfigError, OSError or EngineDeadError if the
    server or a core cannot start.
    """
    llm, names = create_llm(core, config)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(llm, config, names, listening, announce))


def create_llm(core: CoreClient, config: ServerConfig) -> tuple[AsyncLLM, list[str]]:
    """Create the engine for a server's options. Returns it with the names of its model. Raises ConfigError."""
    names = config.served_model_name or [core.config.model.model or "quire-demo"]
    llm = AsyncLLM(
        core=core, metrics_prefix=config.metrics_prefix, served_name=names[0], log_stats=not config.disable_log_stats
    )
    return llm, names


async def _serve(
    llm: AsyncLLM, config: ServerConfig, names: list[str], listening: socket.socket, announce: Callable[[str], None]
) -> int:
    tracing = None
    try:
        server = _Server(config, llm, create_app(llm, config, names), names, announce)
        tracing = server.app.state.tracing
        await llm.start()
        if llm.processor.uses_chat_defaults:
            values = ", ".join(f"{name} {value}" for name, value in llm.processor.chat_defaults.items())
            text = "The GGUF file recommends no sampling parameters: chats have %s (--override-generation-config)"
            logger.info(text, values)
        await server.app.state.server.adapters.start()
        await server.serve(sockets=[listening])
        return 1 if server.engine_failed else 0
    finally:
        if tracing is not None:
            await tracing.close()
        await llm.shutdown()


class _Server(DrainingServer):
    """Also ends if the engine has failed permanently."""

    def __init__(
        self, config: ServerConfig, llm: AsyncLLM, app: FastAPI, names: list[str], announce: Callable[[str], None]
    ) -> None:
        self.app = app
        self.llm = llm
        self.engine_failed = False
        models = ", ".join(names)

        def say(url: str) -> None:
            page = "" if config.disable_ui else f", page {url}/"
            announce(f"Serving at {url}: model {models}, API {url}/v1, description {url}/docs{page}")

        super().__init__(app, config, say)

    async def on_tick(self, counter: int) -> bool:
        if self.llm.client.state is CoreState.DEAD and not self.engine_failed:
            logger.error("The engine has failed for good; the server ends")
            self.engine_failed = self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.app.state.draining = True

    def count_running(self) -> int:
        return 0 if self.engine_failed else self.app.state.server.count_running()

    def has_background_work(self) -> bool:
        return bool(self.app.state.responses.runs)

    def end_running(self) -> None:
        self.app.state.server.end_calls()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self.app.state.responses.store.close()
