"""An HTTP server that waits for free file descriptors, and that lets running requests finish on shutdown."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn

from quire.config.engine import ServerConfig
from quire.observability.logging import logger
from quire.platform.termination import end_if_told, end_signals
from quire.server.connections import limited_protocol
from quire.server.listening import Acceptor
from quire.server.warning_limit import WarningLimit

LAST_WORDS_SECONDS = 2.0  # time for clients to read the errors that end their requests


class DrainingServer(uvicorn.Server, ABC):
    """Announces its URL when it is ready, and drains on shutdown.

    app: an ASGI application. config: its sockets' TLS, its drain timeout, and the limits of connections. announce:
    called with the URL when the server is ready. options: further options of uvicorn.
    """

    def __init__(self, app: Any, config: ServerConfig, announce: Callable[[str], None], **options: Any) -> None:
        self._drain_timeout = config.drain_timeout
        self._tls = config.ssl_certfile is not None
        self._announce = announce
        self._loop = asyncio.get_running_loop()
        self._acceptors: list[Acceptor] = []
        of_uvicorn = logging.getLogger("uvicorn")
        of_uvicorn.handlers = [*logger.handlers]
        of_uvicorn.propagate = False
        of_connections = logging.getLogger("uvicorn.error")
        if not any(isinstance(each, WarningLimit) for each in of_connections.filters):
            of_connections.addFilter(WarningLimit())
        same = "ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers"
        options |= {name: getattr(config, name) for name in same.split()}
        options = {"log_level": config.uvicorn_log_level, "log_config": None, "access_log": False, **options}
        # None of the APIs uses WebSockets. uvicorn would handle their connections outside our limits.
        options |= {"ws": "none", "http": limited_protocol(config), "timeout_keep_alive": config.timeout_keep_alive}
        self._header_timeout = config.header_timeout
        super().__init__(uvicorn.Config(app, lifespan="off", server_header=False, **options))

    @abstractmethod
    def count_running(self) -> int:
        """Return the number of running requests."""

    def has_background_work(self) -> bool:
        """Whether work is running that no client waits for."""
        return False

    @abstractmethod
    def end_running(self) -> None:
        """End all requests, with an error if possible, after the drain timeout."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets
        end_if_told()  # `handle_exit` handles the signals from now on
        config = self.config

        def protocol() -> asyncio.Protocol:
            protocol_class: Any = config.http_protocol_class
            connection: asyncio.Protocol = protocol_class(config, self.server_state, self.lifespan.state)
            return connection

        self._acceptors = [
            Acceptor(listening, config.backlog, protocol, config.ssl, self._header_timeout) for listening in sockets
        ]
        self.started = True
        gc.freeze()  # modules stay loaded; skipping them makes garbage collection ten times faster
        name = sockets[0].getsockname()
        scheme = "https" if self._tls else "http"
        self._announce(f"unix:{name}" if isinstance(name, str) else f"{scheme}://{_in_url(name[0])}:{name[1]}")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            if threading.current_thread() is threading.main_thread():
                for number in end_signals():  # with uvicorn, SIGHUP would end the process
                    signal.signal(number, self.handle_exit)
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin the drain at the first signal. The next signal ends it together with all running requests.

        The exit status is 0 (uvicorn would raise the signal again).
        """
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests finish within the drain timeout, then end the rest."""
        for acceptor in self._acceptors:
            await acceptor.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # closes it as soon as no request runs on it
        seconds = self._drain_timeout
        running = self.count_running()
        if running:
            logger.info("Shutting down: waiting up to %g s for %s.", seconds, _running_requests(running))
        else:
            logger.info("Shutting down: no request is running.")
        if not await self._answered(seconds):
            if running := self.count_running():
                reason = "told to end at once" if self.force_exit else f"the drain timeout of {seconds:g} s is over"
                logger.warning("Shutting down: %s, ending %s.", reason, _running_requests(running))
            self.end_running()
            self.force_exit = False
            await self._answered(LAST_WORDS_SECONDS)
        for connection in list(self.server_state.connections):  # their clients no longer read or send
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=1)

    async def _answered(self, seconds: float) -> bool:
        """Wait until all responses are sent. Return False on a timeout or a signal."""
        end = self._loop.time() + seconds
        state = self.server_state
        while any(map(_is_open, state.connections)) or state.tasks or self.has_background_work():
            if self.force_exit or self._loop.time() >= end:
                return False
            await asyncio.sleep(0.02)
        return True


def _is_open(connection: Any) -> bool:
    """Return False once a connection is closing and everything is sent, whether or not the client has noticed."""
    transport: asyncio.WriteTransport = connection.transport
    return not transport.is_closing() or transport.get_write_buffer_size() > 0


def _running_requests(count: int) -> str:
    return f"{count} running request{'' if count == 1 else 's'}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def loop_factory() -> Any:
    """Return a function that creates a uvloop event loop, or None if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
