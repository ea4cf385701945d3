"""The server's process: socket, engine, HTTP, signals."""

import asyncio
import contextlib
import os
import socket
import ssl
import stat
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from quire.config import ConfigError, ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.engine.core_client import CoreState
from quire.metrics.logging import logger

if TYPE_CHECKING:
    from fastapi import FastAPI


def serve(model: str | None, config: ServerConfig, options: Mapping[str, Any]) -> int:
    """Serve until a signal says otherwise. Returns the exit status. Raises ConfigError, OSError or EngineDeadError if
    it cannot start."""
    with contextlib.closing(_listening_socket(config)) as listening:
        names = config.served_model_name or [model or "quire-demo"]
        llm = AsyncLLM(model, metrics_prefix=config.metrics_prefix, served_name=names[0], **options)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(llm, config, names, listening))


async def _serve(llm: AsyncLLM, config: ServerConfig, names: list[str], listening: socket.socket) -> int:
    try:
        starting = asyncio.create_task(llm.start())
        await asyncio.sleep(0.01)  # its process starts
        from quire.server.app import create_app  # takes a while, which passes while the model is loaded

        server = _Server(config, llm, create_app(llm, config, names))
        await starting
        await server.serve(sockets=[listening])
        return 1 if server.engine_failed else 0
    finally:
        await llm.shutdown()


class _Server(uvicorn.Server):
    """Says where it is when it is ready, drains when told to end, and ends when the engine has failed for good."""

    def __init__(self, config: ServerConfig, llm: AsyncLLM, app: "FastAPI") -> None:
        self.app, self.llm = app, llm
        self.engine_failed = False
        self._about, self._drain_seconds = config, config.drain_timeout
        super().__init__(
            uvicorn.Config(
                self.app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                root_path=config.root_path,
                ssl_keyfile=config.ssl_keyfile,
                ssl_certfile=config.ssl_certfile,
                timeout_graceful_shutdown=max(1, round(config.drain_timeout)),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        scheme = "https" if self._about.ssl_certfile else "http"
        name = sockets[0].getsockname()
        where = f"unix:{name}" if isinstance(name, str) else f"{scheme}://{_in_url(name[0])}:{name[1]}"
        logger.info("Serving at %s (API: %s/v1, description: %s/docs)", where, where, where)

    async def on_tick(self, counter: int) -> bool:
        if self.llm.client.state is CoreState.DEAD and not self.engine_failed:
            logger.error("The engine has failed for good; the server ends")
            self.engine_failed = self.should_exit = True
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of the first signal: drain, and end with status 0 (uvicorn would raise the signal again). Of the next: go."""
        if self.should_exit:
            self.force_exit = True
            return
        logger.info("Ending; running requests have %.0f s to finish", self._drain_seconds)
        self.app.state.draining = self.should_exit = True


def _listening_socket(config: ServerConfig) -> socket.socket:
    """Bound before the model is loaded: a port that is in use is found out at once, and so is a wrong certificate."""
    if config.ssl_certfile is not None:
        try:
            ssl.create_default_context().load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except OSError as error:
            raise ConfigError(f"ssl_keyfile and ssl_certfile cannot be used: {error}") from error
    if config.uds is not None:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(config.uds).st_mode):  # of a server that is gone
                os.unlink(config.uds)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(config.uds)
        return unix
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error}") from error
    return bound


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
