"""`quire serve`: an OpenAI-compatible server."""

import argparse

from quire.cli.flags import add_engine_flags, add_flags, add_log_level, engine_options, server_options
from quire.config import ServerConfig

HELP = "serve a model behind the OpenAI API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="directory or Hugging Face id; the bundled model if left out")
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same, as a flag")
    add_log_level(parser, "INFO")
    add_flags(parser, ServerConfig)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    arguments.model = arguments.model or arguments.model_flag
    options, config = engine_options(arguments), ServerConfig.create(**server_options(arguments))
    from quire.server.serve import serve  # torch comes with it

    return serve(arguments.model, config, options)
