"""The access log: a line for each HTTP request, in the combined format that web servers and their tools know."""

import logging
import sys
from datetime import datetime
from logging.handlers import WatchedFileHandler
from typing import Any

from quire.config import ConfigError
from quire.messages.errors import error_text


class AccessLog:
    """Appends to a file, which may be rotated, or writes to standard output."""

    def __init__(self, target: str) -> None:
        """target: a path, or "-" for standard output. Raises ConfigError if the file cannot be written."""
        try:
            self._handler = logging.StreamHandler(sys.stdout) if target == "-" else WatchedFileHandler(target)
        except OSError as error:
            raise ConfigError(f"access_log={target!r} cannot be written: {error_text(error)}") from error

    def write(self, scope: Any, status: int, sent: int) -> None:
        """scope: of the request, by ASGI. sent: bytes of the response's body."""
        query, headers = scope["query_string"], dict(scope["headers"])
        address = _escaped(str(scope["client"][0]).encode()).replace(" ", r"\x20") if scope.get("client") else "-"
        target = scope["raw_path"] + (b"?" + query if query else b"")
        referer, agent = (_escaped(headers.get(name, b"-")) for name in (b"referer", b"user-agent"))
        line = (
            f"{address} - - [{datetime.now().astimezone():%d/%b/%Y:%H:%M:%S %z}] "
            f'"{_escaped(scope["method"].encode())} {_escaped(target)} HTTP/{scope["http_version"]}" {status} '
            f'{sent or "-"} "{referer}" "{agent}"'
        )
        self._handler.handle(logging.makeLogRecord({"msg": line}))


def _escaped(text: bytes) -> str:
    """What a client has sent, as web servers write it within quotes."""
    return "".join(chr(c) if 32 <= c < 127 and c not in b'"\\' else f"\\x{c:02x}" for c in text)
