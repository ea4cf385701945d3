"""`quire serve`: an OpenAI-compatible server."""

import argparse
import os
from typing import Any

from quire.config import ServerConfig
from quire.metrics.logging import logger
from quire_cli.flags import add_engine_flags, add_flags, add_log_level, engine_options, server_options
from quire_cli.model import add_model

HELP = "serve a model with an OpenAI-compatible API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_log_level(parser, "INFO")
    add_flags(parser, ServerConfig)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    options = engine_options(arguments)
    config = ServerConfig.create(**with_api_key(server_options(arguments)))
    from quire_server.serve import serve

    return serve(arguments.model, config, options)


def with_api_key(options: dict[str, Any]) -> dict[str, Any]:
    """The server's options, with the API key from the environment if they contain none.

    The API key is the only option that the environment can set: on a command line, every user of the machine can read
    it.
    """
    if options.get("api_key"):
        return options
    if key := os.environ.get("QUIRE_API_KEY"):
        return {**options, "api_key": [key]}
    if os.environ.get("VLLM_API_KEY"):
        logger.warning("VLLM_API_KEY has no effect: requests need no API key. Quire reads QUIRE_API_KEY")
    return options
