"""The log: readable lines on standard error, such as `12:03:44 INFO  KV cache: ...`."""

import logging
import sys

logger = logging.getLogger("quire")


def configure_logging(level: str = "INFO") -> None:
    """Send Quire's log to standard error. For the command line: a program that imports Quire configures logging itself.

    Further calls change the level only.
    """
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level.upper())


def logging_level() -> str:
    return logging.getLevelName(logger.getEffectiveLevel())


def printable(text: str, limit: int) -> str:
    """Text from a client, made safe for the log: cut after `limit` characters, and control characters escaped."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:limit])
    return f"{shown}... ({len(text):,} characters)" if len(text) > limit else shown
