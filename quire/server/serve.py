"""`quire serve`: the socket first, then the cores' processes, then everything else."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from quire.config.conflicts import check
from quire.config.engine import EngineConfig, ServerConfig
from quire.config.features import Setup
from quire.engine.core_client import CoreClient, start_cores
from quire.models.heads.resolve import with_files
from quire.server.listening import listening_socket, raise_descriptor_limit


def serve(model: str | None, config: ServerConfig, options: Mapping[str, Any]) -> int:
    """Serve until a signal arrives. Returns the exit status.

    Raises ConfigError, OSError or EngineDeadError if it cannot start.
    """
    engine_config = EngineConfig.create(model=model, **options)
    check(Setup(engine_config, config))
    if engine_config.cluster.headless:
        from quire.engine.headless import run_headless

        return run_headless(*with_files(engine_config))
    with contextlib.closing(listening_socket(config)) as listening:
        raise_descriptor_limit(engine_config.scheduler.max_num_seqs * len(engine_config.layout.served))
        if config.api_server_count > 1:
            cores = start_cores(*with_files(engine_config))
            try:
                from quire.server.processes import ApiProcesses

                return asyncio.run(ApiProcesses(cores, config, listening).run())
            finally:
                cores.kill()
        core = CoreClient(*with_files(engine_config))
        try:
            # Imported here, in parallel with the core's process, which imports torch and loads the model.
            from quire.server.http_server import run

            return run(core, config, listening)
        finally:
            core.kill()
