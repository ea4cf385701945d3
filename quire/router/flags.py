"""The flags of `quire route` for the options in config.py."""

import argparse
from dataclasses import fields
from typing import Any, get_args

from quire.config.kv_transfer import KVTransferOptions
from quire.router.config import Policy, RouteConfig

_DEFAULTS = {field.name: field.default for field in fields(RouteConfig)}


def add_route_flags(parser: argparse.ArgumentParser) -> None:
    servers = parser.add_argument_group("Servers")
    servers.add_argument(
        "--backend",
        "--worker-urls",
        metavar="URL",
        nargs="+",
        action="extend",
        default=[],
        help="URL of a server, such as http://127.0.0.1:8001; may be repeated. All serve the same model, except with "
        "--by-model",
    )
    _add(servers, "max_connections", int, "maximum number of requests at one server; further ones get status 503")
    _add(servers, "connect_timeout", float, "seconds to wait for a connection to a server")
    _add(
        servers,
        "max_retries",
        int,
        "how often a request is sent to another server if one is lost after it got the request and before it answered",
    )
    prefill = parser.add_argument_group("Prefill and decode apart")
    prefill.add_argument(
        "--prefill",
        "--prefill-url",
        metavar="URL[=HOST:PORT]",
        nargs="+",
        action="extend",
        default=[],
        help="URL of a server that only computes prompts (kv_role kv_producer), with its kv_ip and kv_port (default: "
        f"the URL's host and {KVTransferOptions.kv_port}); may be repeated. The servers of --backend (kv_consumer) "
        "fetch the prompts' KV blocks from it",
    )
    _add(prefill, "prefill_min_bytes", int, "requests with a shorter body go to the servers of --backend alone")
    choice = parser.add_argument_group("Choice of the server")
    _add(
        choice,
        "policy",
        str,
        "least-loaded: the server with the fewest requests, where one without an answer so far counts four times; "
        "prefix: the one that got the longest beginning of the text before, unless it is far busier than others; "
        "cached: the one whose cache has the longest beginning of the prompt, as --kv-events say, likewise; "
        "round-robin: each in turn",
        choices=get_args(Policy),
    )
    choice.add_argument(
        "--kv-events",
        metavar="ENDPOINT",
        nargs="+",
        action="extend",
        default=[],
        help="for --policy cached: the KV events of each server of --backend, in their order, such as "
        "tcp://10.0.0.5:5557; those of several replicas are separated by commas",
    )
    choice.add_argument(
        "--kv-events-replay",
        metavar="ENDPOINT",
        nargs="+",
        action="extend",
        default=[],
        help="for --policy cached: the replay_endpoint of each address of --kv-events, written likewise, where the "
        "proxy asks for events that it has missed",
    )
    _add(
        choice,
        "session_header",
        str,
        "header that names a session, such as X-Session-ID: its requests go to the same server, whatever the policy",
    )
    _add(choice, "session_field", str, "field of the body that names a session, such as user, without that header")
    models = parser.add_argument_group("Several models")
    models.add_argument(
        "--by-model",
        action="store_true",
        help="the servers have different models: a request goes to those whose /v1/models lists its model",
    )
    models.add_argument(
        "--rules",
        metavar="FILE",
        help="TOML file with rules that choose a model and its settings by what a request says, for requests whose "
        'model is "auto"; implies --by-model',
    )
    health = parser.add_argument_group("Health checks")
    _add(health, "health_check_interval", float, "seconds between two checks of a server")
    _add(health, "health_check_timeout", float, "seconds after which a check has failed")
    _add(health, "health_failure_threshold", int, "a server gets no requests after so many failed checks in a row")


def _add(group: Any, name: str, kind: Any, help_text: str, choices: Any = None) -> None:
    default = _DEFAULTS[name]
    group.add_argument(
        "--" + name.replace("_", "-"),
        type=kind,
        default=default,
        choices=choices,
        metavar=None if choices else name.rsplit("_", 1)[-1].upper(),
        help=help_text if default is None else f"{help_text} (default: {default})",
    )


def route_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options given as flags, for `RouteConfig(**options)`."""
    return {name: getattr(arguments, name) for name in _DEFAULTS}
