"""Quire's server as a deployment of Ray Serve, which runs as many replicas of it as the load needs.

    pip install ".[ray]" "ray[serve]"
    serve run examples.ray_serve:application model=Qwen/Qwen3-0.6B max_model_len=8192

Each replica is a whole engine with the HTTP API of `quire serve`, and Ray Serve's proxy shares the requests out. The
arguments are options of Quire, and `gpus` and `cpus` (of a replica) and `max_replicas`. A model that needs several
machines is better served by `quire serve --distributed-executor-backend ray`.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import yaml
from fastapi import FastAPI
from ray import serve

from quire.config.engine import EngineConfig, ServerConfig
from quire.engine.core_client import CoreClient
from quire.models.heads.resolve import with_files


def server(options: dict[str, Any]) -> FastAPI:
    """The HTTP API on an engine that starts and ends with it."""
    from quire.server.app import create_app
    from quire.server.http_server import create_llm

    config = ServerConfig.create(served_model_name=[options.pop("served_model_name", options.get("model"))])
    llm, names = create_llm(CoreClient(*with_files(EngineConfig.create(**options))), config)
    app = create_app(llm, config, names)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await llm.start()
        await app.state.server.adapters.start()
        yield
        await llm.shutdown()

    app.router.lifespan_context = life
    return app


def application(options: dict[str, Any]) -> serve.Application:
    """The application for `serve run`, whose arguments are texts."""
    options = {name: yaml.safe_load(str(value)) for name, value in options.items()}
    gpus, cpus = float(options.pop("gpus", 0)), float(options.pop("cpus", 1))
    most = int(options.pop("max_replicas", 1))
    deployment = serve.deployment(serve.ingress(lambda: server(dict(options)))())
    return deployment.options(
        name="quire",
        ray_actor_options={"num_gpus": gpus, "num_cpus": cpus},
        max_ongoing_requests=256,  # of a replica; Quire batches them
        autoscaling_config={"min_replicas": 1, "max_replicas": most, "target_ongoing_requests": 64},
    ).bind()
