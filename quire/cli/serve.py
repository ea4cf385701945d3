"""`quire serve`: an OpenAI-compatible server."""

import argparse
import os
from dataclasses import replace
from functools import partial

from quire.cli.flags import add_engine_flags, add_flags, add_log_level, engine_options, server_options
from quire.cli.model import add_models
from quire.config.conflicts import check
from quire.config.engine import EngineConfig, ServerConfig
from quire.config.features import Setup
from quire.config.several_models import NAMING
from quire.observability.logging import configure_logging, logger

HELP = "serve one or several models with an OpenAI-compatible API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser)
    add_log_level(parser, "INFO")
    add_flags(parser, ServerConfig)
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    if len(arguments.models) > 1 or NAMING.intersection(server_options(arguments)):
        return _serve_models(arguments)
    options = engine_options(arguments)
    config = server_config(arguments)
    from quire.server.serve import serve

    return serve(arguments.model, config, options)


def _serve_models(arguments: argparse.Namespace) -> int:
    models = arguments.models or [arguments.model] * (arguments.model is not None)
    arguments.model = None  # each model is resolved below
    options = engine_options(arguments)
    config = server_config(arguments)
    engine = EngineConfig.create(**options)
    check(Setup(engine, config, several_models=True))
    from quire.cli.models.served import declared_models, found_models, this_machine
    from quire.server.multimodel.serve import serve_models

    declarations = declared_models(models, config, options)
    found = partial(found_models, config, options)
    return serve_models(declarations, config, this_machine(config, options), found, engine.model)


def server_config(arguments: argparse.Namespace) -> ServerConfig:
    """Return the server's options, with the API key from the environment if they contain none. This also sets the log
    format from the options.

    The API key is the only option that can be set by the environment: every user of the machine can read command lines.
    """
    config = ServerConfig.create(**server_options(arguments))
    configure_logging(arguments.log_level, config.log_format)
    if config.api_key:
        return config
    if key := os.environ.get("QUIRE_API_KEY"):
        return replace(config, api_key=[key])
    if os.environ.get("VLLM_API_KEY"):
        logger.warning("VLLM_API_KEY has no effect: requests need no API key. Quire reads QUIRE_API_KEY")
    return config
