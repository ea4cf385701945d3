"""The access log: one line per HTTP request, in the combined log format that web servers use."""

import os
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any

from quire.config.engine import ConfigError
from quire.messages.errors import error_text
from quire.observability.logging import logger


class AccessLog:
    """Appends to a file, which may be rotated, or writes to standard output. Lines that cannot be written, such as on a
    full disk, are lost. The first lost line and the end of the gap are logged."""

    def __init__(self, target: str) -> None:
        """target: a path, or "-" for standard output. Raises ConfigError if the file cannot be written."""
        self._path = None if target == "-" else target
        self._name = "standard output" if self._path is None else target
        self._file = sys.stdout.fileno() if self._path is None else -1
        self._num_lost, self._is_cut = 0, False  # is_cut: the last line is incomplete
        try:
            self._open()
        except OSError as error:
            raise ConfigError(f"access_log={target!r} cannot be written: {error_text(error)}") from error

    def write(self, scope: Any, status: int, sent: int) -> None:
        """scope: the request's ASGI scope. sent: bytes of the response body."""
        query = scope["query_string"]
        headers = dict(scope["headers"])
        address = _escaped(str(scope["client"][0]).encode()).replace(" ", r"\x20") if scope.get("client") else "-"
        target = scope["raw_path"] + (b"?" + query if query else b"")
        referer, agent = (_escaped(headers.get(name, b"-")) for name in (b"referer", b"user-agent"))
        line = (
            f"{address} - - [{datetime.now().astimezone():%d/%b/%Y:%H:%M:%S %z}] "
            f'"{_escaped(scope["method"].encode())} {_escaped(target)} HTTP/{scope["http_version"]}" {status} '
            f'{sent or "-"} "{referer}" "{agent}"\n'
        )
        try:
            self._open()
            self._write(line.encode())
        except OSError as error:
            self._num_lost += 1
            if self._num_lost == 1:
                logger.error("The access log %s cannot be written, and lacks lines: %s", self._name, error_text(error))
            return
        if self._num_lost:
            logger.warning("The access log %s is written again; it lacks %d lines", self._name, self._num_lost)
            self._num_lost = 0

    def _open(self) -> None:
        """Open the file if it is not open, or reopen it if the path names a different file, as after a rotation."""
        if self._path is None:
            return
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._file), os.stat(self._path)):
                return
        new = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if self._file >= 0:
            os.close(self._file)
        self._file = new
        self._is_cut = False

    def _write(self, line: bytes) -> None:
        left = b"\n" + line if self._is_cut else line
        while left:
            left = left[os.write(self._file, left) :]
            self._is_cut = bool(left)


def _escaped(text: bytes) -> str:
    """Text from a client, escaped as web servers do it within quotes."""
    return "".join(chr(c) if 32 <= c < 127 and c not in b'"\\' else f"\\x{c:02x}" for c in text)
