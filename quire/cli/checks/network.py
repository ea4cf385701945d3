"""Checks of the requirements for connections: the hub's token, proxies, and the server's port."""

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from quire.cli.checks.finding import Finding, note, ok, problem
from quire.config.engine import ConfigError, ServerConfig
from quire.messages.errors import error_text

_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_LOOPBACK = ("localhost", "127.0.0.1")


def check_hub() -> Iterator[Finding]:
    """The token is never shown."""
    from huggingface_hub.constants import HF_HUB_OFFLINE, HF_TOKEN_PATH

    name = next((name for name in _TOKENS if os.environ.get(name)), None)
    token = os.environ.get(name, "").strip() if name else ""
    if name and (not token.isascii() or not token.isprintable() or " " in token or os.path.exists(token)):
        kind = "the path of a file" if os.path.exists(token) else "no token"
        yield problem(f"{name} is {kind}", "Set HF_TOKEN to the token itself, or HF_TOKEN_PATH to a file with it.")
    elif name:
        yield ok(f"{name} has a token")
    else:
        try:
            has_token = bool(Path(HF_TOKEN_PATH).read_text().strip())
        except FileNotFoundError:
            has_token = False
        except (OSError, ValueError) as error:
            yield problem(
                f"the token in {HF_TOKEN_PATH} cannot be read, so downloads fail: {error_text(error)}",
                "Make the file readable for this user, or set HF_TOKEN.",
            )
            return
        yield ok(f"a token is in {HF_TOKEN_PATH}" if has_token else "no token, so only public models can be downloaded")
    if HF_HUB_OFFLINE:
        yield note("HF_HUB_OFFLINE is set, so only models in the cache can be used", "Unset it to download models.")


def check_proxies() -> Iterator[Finding]:
    proxies = urllib.request.getproxies_environment()
    unproxied = proxies.pop("no", "").replace(" ", "").split(",")
    if not proxies:
        yield ok("none are set")
        return
    found = ", ".join(f"{kind}: {_without_password(url)}" for kind, url in sorted(proxies.items()))
    if "*" in unproxied or any(host in unproxied for host in _LOOPBACK):
        yield ok(f"{found}; downloads go through them")
    else:
        advice = "Add localhost and 127.0.0.1 to the environment variable no_proxy."
        yield note(f"{found}; clients on this machine may ask them for http://127.0.0.1, too", advice)


def _without_password(url: str) -> str:
    """Return the URL without the user and the password, which are secret."""
    return urlsplit(url if "//" in url else f"//{url}").netloc.rpartition("@")[2]


def check_port() -> Iterator[Finding]:
    from quire.server.listening import listening_socket

    config = ServerConfig()
    try:
        listening_socket(config).close()
    except ConfigError as error:
        advice = "If that is not a server of yours that shall run, end it, or take another port: --port 8001"
        yield note(error_text(error), advice)
    else:
        yield ok(f"{config.port} is free on {config.host}")
