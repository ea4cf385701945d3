"""The listening socket, and connections that wait for a file descriptor instead of being lost."""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import ssl
import stat
from collections.abc import Callable

from quire.config.engine import ConfigError, ServerConfig
from quire.messages.errors import error_text
from quire.observability.logging import logger

RESERVED_DESCRIPTORS = 16  # reserved for files and for the sockets of a restarted engine core
SMALL_LIMIT = 1024
_RETRY_SECONDS = 0.05
_REPEAT_SECONDS = 10.0  # between two log lines about waiting connections
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_descriptor_limit(expected_connections: int) -> None:
    """Raise this process's soft limit of open files to the hard limit. Logs a warning if the result is small."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # "unlimited" can be more than the kernel allows
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = _descriptor_limit()
    if limit < max(SMALL_LIMIT, expected_connections + 4 * RESERVED_DESCRIPTORS):
        logger.warning(
            "The limit of open files is small: %d. Each connection takes one, and connections beyond the limit wait. "
            "Raise the hard limit (ulimit -Hn, LimitNOFILE)",
            limit,
        )


def _descriptor_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft


def listening_socket(config: ServerConfig) -> socket.socket:
    """Create and bind the socket. This happens before the model is loaded, to find a used port or a bad certificate
    early.

    Raises ConfigError or OSError.
    """
    if config.ssl_certfile is not None:
        try:
            ssl.create_default_context().load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except OSError as error:
            raise ConfigError(f"ssl_keyfile and ssl_certfile cannot be used: {error_text(error)}") from error
        try:
            context = ssl.create_default_context(cafile=config.ssl_ca_certs)
            context.set_ciphers(config.ssl_ciphers or "DEFAULT")
        except OSError as error:
            raise ConfigError(f"ssl_ca_certs or ssl_ciphers cannot be used: {error_text(error)}") from error
    if config.uds is not None:
        unix = socket.socket(socket.AF_UNIX)
        try:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.stat(config.uds).st_mode):  # left by a server that has ended
                    os.unlink(config.uds)
            unix.bind(config.uds)
        except OSError as error:
            unix.close()
            raise ConfigError(f"uds={config.uds!r} cannot be made: {error_text(error)}") from error
        return unix
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {error_text(error)}") from error
    return bound


class Acceptor:
    """Accepts connections while file descriptors are free. Further ones wait in the kernel's queue.

    uvloop's own server closes a connection for which there is no descriptor, without any notice.
    """

    def __init__(
        self,
        listening: socket.socket,
        backlog: int,
        protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        handshake_timeout: float,
    ) -> None:
        """protocol: creates the protocol of a connection. handshake_timeout: seconds for the TLS handshake."""
        listening.setblocking(False)
        listening.listen(backlog)
        self._listening = listening
        self._protocol = protocol
        self._context = context
        self._limit = _descriptor_limit()
        self._handshake_timeout = None if context is None else handshake_timeout
        self._handshakes: set[asyncio.Task[None]] = set()
        self._logged_at = float("-inf")
        self._task = asyncio.create_task(self._accept(), name="accept connections")

    async def close(self) -> None:
        """Reject new connections, including those that wait in the kernel's queue."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._listening.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._has_descriptor():
                self._log("the limit of open files (%d) is reached", self._limit)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # affects this connection only, unless descriptors or memory are short
                if error.errno in _NO_DESCRIPTOR:
                    self._log("accept failed: %s", error)
                    await asyncio.sleep(_RETRY_SECONDS)
                continue
            task = loop.create_task(self._connect(connection))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _connect(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client disconnected, or does not speak TLS
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._context, ssl_handshake_timeout=self._handshake_timeout
            )

    def _has_descriptor(self) -> bool:
        """Whether descriptors are free. A new one gets the lowest free number, which shows how many are in use."""
        try:
            number = os.dup(self._listening.fileno())
        except OSError:
            return False
        os.close(number)
        return number < self._limit - RESERVED_DESCRIPTORS

    def _log(self, reason: str, *details: object) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= _REPEAT_SECONDS:
            self._logged_at = now
            logger.warning(f"New connections wait: {reason}", *details)
