"""The HTTP side of `quire serve`: from a core that is loading to the end of the last answer."""

import asyncio
import gc
import logging
import socket
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from quire.config import ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.core_client import CoreClient, CoreState
from quire.metrics.logging import logger
from quire.metrics.requests import RequestLog
from quire_server.app import create_app
from quire_server.listening import Acceptor

LAST_WORDS_SECONDS = 2.0  # in which clients may read the errors with which their requests end


def run(
    core: CoreClient, config: ServerConfig, listening: socket.socket, announce: Callable[[str], None] = logger.info
) -> int:
    """Build the server, wait for the cores, and serve until a signal. Returns the exit status.

    announce: is told when the server is ready, and at which URL. Raises ConfigError, OSError or EngineDeadError if the
    server or a core cannot start.
    """
    llm, names = create_llm(core, config)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(llm, config, names, listening, announce))


def create_llm(core: CoreClient, config: ServerConfig) -> tuple[AsyncLLM, list[str]]:
    """The engine that a server's options describe, and the names of its model. Raises ConfigError."""
    names = config.served_model_name or [core.config.model.model or "quire-demo"]
    llm = AsyncLLM(
        core=core, metrics_prefix=config.metrics_prefix, served_name=names[0], log_stats=not config.disable_log_stats,
        request_log=RequestLog(config.enable_log_requests, config.max_log_len),
    )  # fmt: skip
    return llm, names


async def _serve(
    llm: AsyncLLM, config: ServerConfig, names: list[str], listening: socket.socket, announce: Callable[[str], None]
) -> int:
    try:
        server = _Server(config, llm, create_app(llm, config, names), names, announce)
        await llm.start()
        await server.app.state.server.adapters.start()
        await server.serve(sockets=[listening])
        return 1 if server.engine_failed else 0
    finally:
        await llm.shutdown()


class _Server(uvicorn.Server):
    """Announces its URL when it is ready, drains when it is told to end, and ends if the engine has failed for good."""

    def __init__(
        self, config: ServerConfig, llm: AsyncLLM, app: FastAPI, names: list[str], announce: Callable[[str], None]
    ) -> None:
        self.app, self.llm, self._names, self._announce = app, llm, names, announce
        self.engine_failed = False
        self._about = config
        self._loop = asyncio.get_running_loop()
        self._acceptors: list[Acceptor] = []
        logging.getLogger("uvicorn").handlers = logger.handlers
        same = "ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers"
        options: dict[str, Any] = {name: getattr(config, name) for name in same.split()}
        options |= {"log_config": None, "log_level": config.uvicorn_log_level, "access_log": False}
        super().__init__(uvicorn.Config(self.app, lifespan="off", server_header=False, **options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets
        config = self.config

        def protocol() -> asyncio.Protocol:
            protocol_class: Any = config.http_protocol_class
            connection: asyncio.Protocol = protocol_class(config, self.server_state, self.lifespan.state)
            return connection

        self._acceptors = [Acceptor(listening, config.backlog, protocol, config.ssl) for listening in sockets]
        self.started = True
        gc.freeze()  # loaded modules stay; without them, garbage collection takes a tenth of the time
        scheme = "https" if self._about.ssl_certfile else "http"
        name = sockets[0].getsockname()
        where = f"unix:{name}" if isinstance(name, str) else f"{scheme}://{_in_url(name[0])}:{name[1]}"
        models = ", ".join(self._names)
        self._announce(f"Serving at {where}: model {models}, API {where}/v1, description {where}/docs")

    async def on_tick(self, counter: int) -> bool:
        if self.llm.client.state is CoreState.DEAD and not self.engine_failed:
            logger.error("The engine has failed for good; the server ends")
            self.engine_failed = self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the drain. The next one ends it, and what still runs.

        The exit status is 0 (uvicorn would raise the signal again).
        """
        self.force_exit = self.should_exit
        self.app.state.draining = self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Running requests may finish within the drain timeout; those that do not end with an error."""
        for acceptor in self._acceptors:
            await acceptor.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # closes it as soon as no request runs on it
        seconds, server = self._about.drain_timeout, self.app.state.server
        if server.calls and not self.engine_failed:
            logger.info("Shutting down: waiting up to %g s for %s.", seconds, _running_requests(server.calls))
        if not await self._answered(seconds):
            if server.calls:
                reason = "told to end at once" if self.force_exit else f"the drain timeout of {seconds:g} s is over"
                logger.warning("Shutting down: %s, ending %s.", reason, _running_requests(server.calls))
            server.end_calls()
            self.force_exit = False
            await self._answered(LAST_WORDS_SECONDS)
        for connection in list(self.server_state.connections):  # their clients have stopped reading or sending
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=1)
        self.app.state.responses.store.close()

    async def _answered(self, seconds: float) -> bool:
        """Wait until all answers are sent; False if the time passes before, or at a signal."""
        end = self._loop.time() + seconds
        background = self.app.state.responses.runs
        while any(map(_is_open, self.server_state.connections)) or self.server_state.tasks or background:
            if self.force_exit or self._loop.time() >= end:
                return False
            await asyncio.sleep(0.02)
        return True


def _is_open(connection: Any) -> bool:
    """False once a connection is closing and all is sent, whether or not the client has noticed."""
    transport: asyncio.WriteTransport = connection.transport
    return not transport.is_closing() or transport.get_write_buffer_size() > 0


def _running_requests(calls: Collection[object]) -> str:
    return f"{len(calls)} running request{'' if len(calls) == 1 else 's'}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def loop_factory() -> Any:
    """A function that makes a uvloop, or None if it is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
