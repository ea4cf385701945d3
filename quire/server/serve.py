"""`quire serve`: the socket first, then the core's process, then everything else."""

import contextlib
from collections.abc import Mapping
from typing import Any

from quire.config import EngineConfig, ServerConfig
from quire.engine.core_client import CoreClient
from quire.models.heads.resolve import with_files
from quire.server.listening import listening_socket, raise_descriptor_limit


def serve(model: str | None, config: ServerConfig, options: Mapping[str, Any]) -> int:
    """Serve until a signal says otherwise. Returns the exit status.

    Raises ConfigError, OSError or EngineDeadError if it cannot start.
    """
    with contextlib.closing(listening_socket(config)) as listening:
        engine_config = EngineConfig.create(model=model, **options)
        raise_descriptor_limit(engine_config.scheduler.max_num_seqs)
        core = CoreClient(*with_files(engine_config))
        try:
            # Imported here, since it takes a while, in which the core's process imports torch and loads the model.
            from quire.server.http_server import run

            return run(core, config, listening)
        finally:
            core.kill()
