"""The server's ASGI application."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from fastapi import APIRouter, Depends, FastAPI
from fastapi.security import HTTPBearer
from fastapi_swagger import patch_fastapi
from prometheus_client.registry import Collector
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route

from quire._version import __version__
from quire.config.conflicts import check
from quire.config.engine import ConfigError, ServerConfig
from quire.config.features import Setup
from quire.engine.async_llm import AsyncLLM
from quire.engine.frontend import chosen_parser
from quire.observability.logging import logger
from quire.parsing.formats import TOOLS
from quire.server import (
    admin_routes,
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
from quire.server.adapters import Adapters
from quire.server.adapters import router as adapter_router
from quire.server.bodies import LARGE_BODY, BodyLimit, Preparing
from quire.server.errors import add_error_handlers
from quire.server.generation import Server
from quire.server.keep_alive import KeepAlive, Residence
from quire.server.media import MediaLoader
from quire.server.middleware import ApiKeys, RootPath, add_middleware
from quire.server.observability import PROBES, HttpMetrics, Observability
from quire.server.origins import OriginGuard
from quire.server.page import routes as page
from quire.server.page.live import Live
from quire.server.process_metrics import ProcessMetrics, server_processes
from quire.server.request_log import RequestLog
from quire.server.tracing import begin_tracing


@dataclass(frozen=True)
class Shared:
    """The parts of a server that all of its models share."""

    config: ServerConfig
    log: RequestLog
    responses: responses_api.Responses
    preparing: Preparing = field(default_factory=Preparing)

    @classmethod
    def create(cls, config: ServerConfig) -> Self:
        """Raises ConfigError."""
        return cls(config, RequestLog(config), responses_api.Responses(config))


# The APIs of one model. Their clients name it in the body, or in the parameter `model` of the URL.
MODEL_APIS = (
    completions.router,
    chat.router,
    responses_api.router,
    anthropic.router,
    ollama.router,
    token_generation.router,
    text_routes.router,
    pooling.router,
    control.router,
    prefixes.router,
    transcriptions.router,
    adapter_router,
)


def create_app(llm: AsyncLLM, config: ServerConfig, model_names: list[str]) -> FastAPI:
    """Build the app with OpenAI's and the other APIs. The caller starts and shuts down the engine.

    Set `app.state.draining` to reject new generation requests with 503 while running requests continue. Raises
    ConfigError for options that do not fit the model.
    """
    shared = Shared.create(config)
    app = model_app(llm, shared, config, model_names, KeepAlive(llm, config))
    processes = ProcessMetrics(partial(server_processes, llm.client), llm.config.parallel.ranks > 1)
    add_server_middleware(app, shared, processes, api_routes(config), app.state.large_body)
    return app


def new_app(config: ServerConfig) -> FastAPI:
    """Return an app without routes, except for the description of its API."""
    app = FastAPI(
        title="Quire",
        version=__version__,
        description="The APIs of OpenAI, Anthropic and Ollama. Unknown fields are ignored; null is as if left out.",
        openapi_url=None if config.disable_fastapi_docs else "/openapi.json",
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        # FastAPI's built-in OpenTelemetry would add a second span to ours, and would send error texts. Versions without
        # it keep the unknown argument in `extra`.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    # FastAPI's own page loads its script from the internet, which servers and their users often cannot reach.
    if not config.disable_fastapi_docs:
        patch_fastapi(app, redirect_from_root_to_docs=False, title="Quire's API")
    app.state.draining = False
    add_error_handlers(app)
    return app


def include_apis(app: FastAPI, config: ServerConfig, routers: Iterable[APIRouter]) -> None:
    bearer: list[Any] = [Depends(HTTPBearer(auto_error=False))] if config.api_key else []  # for the documents
    for router in routers:
        app.include_router(router, dependencies=bearer)


def api_routes(config: ServerConfig) -> list[BaseRoute]:
    """Return the routes whose paths metrics and spans show."""
    routers = [admin_routes.router, *MODEL_APIS, responses_api.stored]
    if not config.disable_ui:
        routers += page.router, page.files
    described = [route for route in new_app(config).routes if isinstance(route, Route)]
    return [*described, *(route for router in routers for route in router.routes)]


def model_app(
    llm: AsyncLLM, shared: Shared, config: ServerConfig, model_names: list[str], residence: Residence
) -> FastAPI:
    """Build the app of one model, without middleware. config: the options of the server for this model.

    Raises ConfigError for options that do not fit the model.
    """
    check(Setup(llm.config, config))
    app = new_app(config)
    adapters = Adapters(llm, config, model_names)
    parser = _tool_parser(config, llm)
    media = MediaLoader(llm)
    app.state.server = server = Server(
        llm, config, model_names, parser, app, adapters, shared.log, media, residence, shared.preparing
    )
    app.state.ollama = ollama.State(llm, model_names, lambda: server.names)
    app.state.responses = shared.responses
    app.state.config = config
    app.state.large_body = min(LARGE_BODY, llm.get_tokenizer().longest_quick or LARGE_BODY)
    include_apis(app, config, [*MODEL_APIS, responses_api.stored])
    app.include_router(admin_routes.router)
    if not config.disable_ui:
        app.state.live = Live(llm, lambda: bool(app.state.draining))
        app.include_router(page.router)
        app.include_router(page.files)
    else:
        app.include_router(ollama.heartbeat)
    return app


def add_server_middleware(
    app: FastAPI, shared: Shared, processes: Collector, routes: Sequence[BaseRoute], large: int = LARGE_BODY
) -> None:
    """Add the limits, checks and records that apply to all requests of a server. Raises ConfigError.

    processes: the metrics of the server's processes. routes: see `api_routes`. large: see BodyLimit.
    """
    config = shared.config
    app.state.http_metrics = http_metrics = HttpMetrics(processes)
    app.state.tracing = tracing = begin_tracing(config.otlp_traces_endpoint, "quire", _has_no_span)
    # The middleware that is added last runs first.
    sizes = {"limit": config.max_body_bytes, "total_limit": config.max_total_body_bytes}
    app.add_middleware(BodyLimit, **sizes, seconds=config.body_timeout, preparing=shared.preparing, large=large)
    if config.api_key:
        app.add_middleware(ApiKeys, keys=config.api_key, open_paths=() if config.disable_ui else page.OPEN_PATHS)
    app.add_middleware(OriginGuard, allowed=config.allowed_origins)
    if config.allowed_origins:
        allowed: Any = {
            f"allow_{kind}": getattr(config, f"allowed_{kind}") for kind in ("origins", "methods", "headers")
        }
        allowed |= {"allow_credentials": config.allow_credentials, "expose_headers": ["X-Request-Id", "traceresponse"]}
        app.add_middleware(CORSMiddleware, **allowed)
    for path in config.middleware:
        add_middleware(app, path)
    app.add_middleware(Observability, metrics=http_metrics, log=shared.log, routes=routes, tracing=tracing)
    if root_path := config.root_path.strip("/"):
        app.add_middleware(RootPath, root_path=f"/{root_path}")


def _has_no_span(path: str) -> bool:
    """Whether requests for a path come from probes or from a browser that loads a page."""
    return path in (*PROBES, "/", "/docs", "/openapi.json") or path.startswith("/ui/")


def _tool_parser(config: ServerConfig, llm: AsyncLLM) -> str | None:
    """Return the name of the model's tool-call format. Raises ConfigError."""
    frontend = llm.frontend
    recognized = frontend.recognized_tools
    vocabulary = frontend.tokenizer.get_vocab
    parser = chosen_parser("tool_call_parser", config.tool_call_parser, recognized, TOOLS, vocabulary)
    if config.enable_auto_tool_choice and parser is None:
        message = "enable_auto_tool_choice needs tool_call_parser: the chat template tells no format of tool calls"
        raise ConfigError(message)
    for what, name, given in (
        ("Thinking", frontend.reasoning, llm.config.model.reasoning_parser),
        ("Tool calls", parser, config.tool_call_parser),
    ):
        if name is not None:
            logger.info("%s: in the format %s%s", what, name, "" if given else ", recognized from the chat template")
    return parser
