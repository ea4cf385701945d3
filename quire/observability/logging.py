"""The log on standard error: readable lines such as `12:03:44 INFO    KV cache: ...`, or one JSON object per line."""

import io
import json
import logging
import sys
import threading
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NamedTuple

logger = logging.getLogger("quire")
# What the records of a task are about, such as one of several models.
log_subject: ContextVar[str] = ContextVar("log_subject", default="")
_subject = ""  # the same for a process


class LogOptions(NamedTuple):
    """How a process logs. level: the lowest one that is logged. format: "text" or "json". subject: what its records are
    about, such as one of several models; empty for a server with one."""

    level: str = "INFO"
    format: str = "text"
    subject: str = ""


def configure_logging(level: str = "INFO", format: str = "text", subject: str = "") -> None:
    """Send Quire's log to standard error. For the command line: a program that imports Quire configures logging itself.

    With "json", everything that Python code prints on standard error becomes part of the log, too. Further calls change
    the level, the format and the subject.
    """
    global _subject
    _subject = subject
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler(sys.stderr))
        logger.propagate = False
    for handler in logger.handlers:
        handler.setFormatter(_JsonFormatter() if format == "json" else _TextFormatter())
    if format == "json" and isinstance(handler := logger.handlers[0], logging.StreamHandler):
        _take_over(handler)
    logger.setLevel(level.upper())


def log_options() -> LogOptions:
    """Return the options of this process, for the processes that it starts."""
    is_json = any(isinstance(handler.formatter, _JsonFormatter) for handler in logger.handlers)
    level = logging.getLevelName(logger.getEffectiveLevel())
    return LogOptions(level, "json" if is_json else "text", _current_subject())


def _current_subject() -> str:
    return log_subject.get() or _subject


def printable(text: str, limit: int | None = None) -> str:
    """Return a client's text in a form that is safe for the log: cut after `limit` characters, with control characters
    escaped."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:limit])
    return f"{shown}... ({len(text):,} characters)" if limit is not None and len(text) > limit else shown


class _TextFormatter(logging.Formatter):
    """Escapes control characters, and indents further lines of a message, so that no message can imitate another
    one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(subject)s%(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        subject = _current_subject()
        record.subject = f"[{subject}] " if subject else ""
        text = super().format(record)
        return text if text.isprintable() else "\n    ".join(map(printable, text.split("\n")))


class _JsonFormatter(logging.Formatter):
    """A record's `fields`, which callers give as extra={"fields": {...}}, become keys of the object."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.processName,
            "pid": record.process,
            "message": record.getMessage(),
            **({"subject": subject} if (subject := _current_subject()) else {}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0]:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _Stderr(io.TextIOBase):
    """Replaces standard error. Each line printed there becomes a log entry."""

    def __init__(self, handler: "logging.StreamHandler[Any]") -> None:
        self._handler = handler
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in filter(str.strip, lines):
            record = logging.LogRecord("stderr", logging.INFO, "", 0, line, None, None)
            # Not by handler.emit: the handler prints its own errors to standard error, which is this object.
            self._handler.stream.write(self._handler.format(record) + "\n")
        return len(text)

    def fileno(self) -> int:
        return int(self._handler.stream.fileno())


def _take_over(handler: "logging.StreamHandler[Any]") -> None:
    """Send other libraries' logs, warnings, and the tracebacks and output of this process to a handler."""

    def unhandled(exception: Any) -> None:
        logger.critical("An exception was not handled", exc_info=exception)

    logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    sys.excepthook = lambda *exception: unhandled(exception)
    threading.excepthook = lambda found: unhandled((found.exc_type, found.exc_value, found.exc_traceback))
    sys.stderr = _Stderr(handler)
