"""`quire serve`: an OpenAI-compatible server."""

import argparse

from quire.cli.flags import add_engine_flags, add_flags, add_log_level, engine_options, server_options
from quire.cli.model import add_model
from quire.config import ServerConfig

HELP = "serve a model behind the OpenAI API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_log_level(parser, "INFO")
    add_flags(parser, ServerConfig)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    options, config = engine_options(arguments), ServerConfig.create(**server_options(arguments))
    from quire.server.serve import serve  # torch comes with it

    return serve(arguments.model, config, options)
