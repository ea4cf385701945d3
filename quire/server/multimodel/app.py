"""The app in front of several models."""

import os
from collections.abc import Mapping
from functools import partial

from fastapi import FastAPI

from quire.config.engine import ModelConfig
from quire.server import (
    anthropic,
    chat,
    completions,
    control,
    ollama,
    pooling,
    prefixes,
    responses_api,
    text_routes,
    token_generation,
    transcriptions,
)
from quire.server.adapters import router as adapter_router
from quire.server.app import Shared, add_server_middleware, api_routes, include_apis, new_app
from quire.server.multimodel import ollama_routes, routes
from quire.server.multimodel.dispatcher import Dispatcher
from quire.server.multimodel.rules import RuledRequests
from quire.server.multimodel.table import ModelTable
from quire.server.page import routes as page
from quire.server.process_metrics import ProcessMetrics

_APIS = (
    completions.router,
    chat.router,
    responses_api.router,
    anthropic.router,
    *ollama.MODEL_ROUTERS,
    token_generation.router,
    text_routes.router,
    pooling.router,
    prefixes.router,
    transcriptions.router,
    adapter_router,
)


def create_front_app(
    table: ModelTable, shared: Shared, options: ModelConfig, rules: RuledRequests | None = None
) -> FastAPI:
    """Build the app that answers for all models together, and sends other requests to the apps of models. Raises
    ConfigError.

    options: say where models are downloaded to. rules: the semantic router.
    """
    config = shared.config
    app = new_app(config)
    app.state.table = table
    app.state.config = config
    app.state.ruled_names = [] if rules is None else rules.names
    app.state.responses = shared.responses
    app.state.ollama = library = ollama.Library(options, partial(_served, table))
    app.include_router(routes.router)
    app.include_router(ollama_routes.router)
    include_apis(app, config, [responses_api.stored, *ollama.SERVER_ROUTERS])
    app.include_router(ollama.heartbeat if config.disable_ui else page.files)
    include_apis(app, config, [*_APIS, control.router])  # for the API's description: the dispatcher takes the requests
    app.add_middleware(
        Dispatcher,
        table=table,
        created=library.library,
        config=config,
        routes=[route for router in _APIS for route in router.routes],
        controls=control.router.routes,
        watches=() if config.disable_ui else page.router.routes,
        rules=rules,
    )
    processes = ProcessMetrics(partial(_processes, table), has_ranks=True)
    add_server_middleware(
        app, shared, processes, [*routes.router.routes, *ollama_routes.router.routes, *api_routes(config)]
    )
    return app


def _served(table: ModelTable) -> list[ollama.Served]:
    return [ollama.Served(model.names, model.directory) for model in table.models]


def _processes(table: ModelTable) -> Mapping[str, int]:
    """Return the process ids of the server and of all cores, by name."""
    cores = {
        f"core {number} of {model.name}": pid
        for model, loaded in table.loaded
        for number, pid in enumerate(loaded.llm.client.process_ids)
        if pid is not None
    }
    return {"api 0": os.getpid(), **cores}
