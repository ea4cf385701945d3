"""`quire top`: shows a server's activity in a terminal."""

import argparse
import os
import sys
from urllib.parse import urlsplit

from quire.config.engine import ConfigError

HELP = "show in this terminal what a server does"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        default="http://127.0.0.1:8000",
        help="of the server (default: http://127.0.0.1:8000); if its page is off, or it is vLLM's, metrics are shown",
    )
    parser.add_argument("--api-key", metavar="KEY", help="that the server needs (default: QUIRE_API_KEY)")


def run(arguments: argparse.Namespace) -> int:
    url = arguments.url if "://" in arguments.url else f"http://{arguments.url}"
    url = url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"URL must be that of a server, such as http://127.0.0.1:8000, got {arguments.url!r}")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RuntimeError("quire top needs a terminal; programs can read /metrics")
    from quire.cli.watch.feed import Feed
    from quire.cli.watch.show import show

    feed = Feed(url, arguments.api_key or os.environ.get("QUIRE_API_KEY"))
    show(feed, url)
    if feed.refusal:
        raise RuntimeError(feed.refusal)
    return 0
