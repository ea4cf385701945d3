"""The loop of `quire top`: draws until a key that quits is pressed."""

import contextlib
import io
import os
import select
import sys
import termios
import tty
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live
from rich.text import Text

from quire.cli.watch.feed import Feed
from quire.cli.watch.screen import draw

_SECONDS = 0.25  # between two drawings


def show(feed: Feed, url: str) -> None:
    """Draw a feed's state until q, Escape or Ctrl-C is pressed, the terminal is closed, or the feed is refused."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack the characters of the bars
    console = Console(highlight=False)
    live = Live(Text(), console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), _keys_at_once(), live:
        while not feed.refusal:
            with feed.lock:
                screen = draw(feed, url, *console.size)
            live.update(screen, refresh=True)
            keys = _keys()
            if keys is not None and (keys in (b"", b"\x1b") or b"q" in keys.lower()):
                return


def _keys() -> bytes | None:
    """Return the keys pressed within some time; empty if the terminal is closed, None if no key was pressed."""
    if not select.select([sys.stdin], [], [], _SECONDS)[0]:
        return None
    return os.read(sys.stdin.fileno(), 64)


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """A context in which the terminal passes keys on immediately, and does not echo them."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
