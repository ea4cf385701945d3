"""`quire route`: a proxy in front of several servers."""

import argparse

from quire.cli import route_train
from quire.cli.flags import add_flags, add_log_level
from quire.cli.serve import server_config
from quire.config.engine import ServerConfig
from quire.platform.extras import install_command

HELP = "send the requests of clients to several servers, and choose among their models"
_SHARED = (
    "host port uds api_key ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers "
    "drain_timeout max_body_bytes max_total_body_bytes h11_max_incomplete_event_size h11_max_header_count "
    "timeout_keep_alive header_timeout body_timeout log_format access_log otlp_traces_endpoint"
).split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from quire.router.flags import add_route_flags

    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    route_train.add_arguments(actions.add_parser("train", help=route_train.HELP, description=route_train.HELP))
    add_route_flags(parser)
    add_log_level(parser, "INFO")
    add_flags(parser, ServerConfig, _SHARED)
    parser.set_defaults(config=None, train=False)


def run(arguments: argparse.Namespace) -> int:
    if arguments.train:
        return route_train.run(arguments)
    from quire.router.config import RouteConfig
    from quire.router.flags import route_options

    config_of_server = server_config(arguments)
    config = RouteConfig(**route_options(arguments))
    try:
        from quire.router.serve import serve
    except ModuleNotFoundError as error:
        raise RuntimeError(f"quire route needs {error.name}: {install_command('route')}") from error
    return serve(config, config_of_server)
