"""`quire route`: the proxy from its start to the end of the last response."""

import asyncio
import contextlib
import socket
from pathlib import Path

from quire.config.engine import ServerConfig
from quire.observability.logging import logger
from quire.router.bodies import Bodies
from quire.router.client import connect
from quire.router.config import RouteConfig
from quire.router.fleet import Fleet
from quire.router.health import HealthChecks
from quire.router.metrics import RouteMetrics
from quire.router.prefill import Prefills
from quire.router.proxy import Extras, Proxy
from quire.server.access_log import AccessLog
from quire.server.draining import DrainingServer, loop_factory
from quire.server.listening import listening_socket, raise_descriptor_limit
from quire.server.tracing import begin_tracing


def serve(config: RouteConfig, server_config: ServerConfig) -> int:
    """Forward requests until a signal arrives. Returns the exit status. Raises ConfigError or OSError if it cannot
    start."""
    with contextlib.closing(listening_socket(server_config)) as listening:
        raise_descriptor_limit(2 * config.max_connections * len(config.backend + config.prefill))
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(config, server_config, listening))
    return 0


async def _serve(config: RouteConfig, server_config: ServerConfig, listening: socket.socket) -> None:
    metrics = RouteMetrics()
    access_log = AccessLog(server_config.access_log) if server_config.access_log else None
    tracing = begin_tracing(server_config.otlp_traces_endpoint, "quire-route")
    cached = None
    if config.policy == "cached":
        from quire.router.prefix_index import CachedPrefixes, Tokens, listen

        cached = CachedPrefixes([server for server, *_ in config.streams])
    fleet = Fleet(config, metrics, cached=cached)
    prefill_fleet = Fleet(config, metrics, "prefill") if config.prefill else None
    bodies = Bodies(server_config.max_body_bytes, server_config.max_total_body_bytes, server_config.body_timeout)
    keys = server_config.api_key
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect(config))
        decisions = None
        if config.rules is not None:
            from quire.router.decisions import Decisions
            from quire.semantic.router import SemanticRouter
            from quire.semantic.rules import Rules

            semantic = await SemanticRouter.start(Rules.read(Path(config.rules)))
            stack.push_async_callback(semantic.close)
            decisions = Decisions(semantic, metrics)
        fleets = [fleet] if prefill_fleet is None else [fleet, prefill_fleet]
        checks = [HealthChecks(config, fleet, client, keys[0] if keys else None) for fleet in fleets]
        await asyncio.gather(*(check.start() for check in checks))
        listeners = []
        if cached is not None:
            streams = [listen(cached, i, endpoint, replay) for i, (_, endpoint, replay) in enumerate(config.streams)]
            listeners = [asyncio.create_task(stream) for stream in streams]
        try:
            prefills = None if prefill_fleet is None else Prefills(config, client, prefill_fleet)
            tokens = None if cached is None else Tokens(client, fleet)
            extras = Extras(prefills, tokens, access_log, tracing, decisions)
            proxy = Proxy(config, keys, client, bodies, fleet, metrics, extras)
            await _Server(proxy, server_config).serve(sockets=[listening])
        finally:
            for listener in listeners:
                listener.cancel()
            for check in checks:
                check.stop()
            if tracing is not None:
                await tracing.close()


class _Server(DrainingServer):
    def __init__(self, proxy: Proxy, config: ServerConfig) -> None:
        self._proxy = proxy
        servers = f"{len(proxy.fleet.backends)} server{'' if len(proxy.fleet.backends) == 1 else 's'}"
        if proxy.config.prefill:
            servers += f", prompts to {len(proxy.config.prefill)} more"
        # The proxy logs each problem itself, with the request's id. The servers' responses already have a date.
        super().__init__(
            proxy,
            config,
            lambda url: logger.info("Routing at %s: to %s, by %s", url, servers, proxy.config.policy),
            log_level="critical",
            date_header=False,
            proxy_headers=False,
        )

    def count_running(self) -> int:
        return len(self._proxy.running)

    def end_running(self) -> None:
        self._proxy.end_running()
