"""Replicas on a Ray cluster: one actor for each, which runs the same code as `quire serve --headless`.

A separate process talks to Ray, since Ray ends processes that lose their cluster, and replaces their signal handlers.
"""

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

from quire.cluster.secret import ClusterSecret
from quire.config.engine import ConfigError, EngineConfig
from quire.executor.ray_cluster import Actors, RayCluster, portable, resources, unpacked, uses_gpus
from quire.messages.errors import error_text
from quire.observability.logging import LogOptions, configure_logging, log_options, logger
from quire.platform.termination import leave_end_to_parent

_ALONE: dict[str, float] = {"memory": 1 << 20}  # resources of a core whose ranks are actors themselves: bytes
_AGAIN_SECONDS = 2.0  # between the end of an actor and its restart


class RayReplicas:
    """Keeps an actor running for each replica. host: the address of this machine at which they can join."""

    def __init__(self, config: EngineConfig, replicas: range, secret: ClusterSecret) -> None:
        """Raises ConfigError if Ray is missing or cannot be reached."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_launch, args=(theirs, portable(config), replicas, secret.secret, log_options()), name="quire-ray"
        )
        self._process.start()
        theirs.close()
        try:
            found = self._connection.recv()
        except EOFError:
            found = ConfigError("the process that talks to Ray has ended")
        if isinstance(found, ConfigError):
            self.close()
            raise found
        self.host: str = found

    def start(self, port: int) -> None:
        """Start the actors. port: the port of this machine at which they join."""
        self._connection.send(port)

    def refused(self) -> Iterator[tuple[int, str]]:
        """Yield the replicas that failed for good since the last call, and why. Other failed replicas are restarted."""
        try:
            while self._connection.poll():
                yield self._connection.recv()
        except (EOFError, OSError):
            return

    def close(self) -> None:
        self._connection.close()
        self._process.join(2)
        self._process.kill()
        self._process.join()


def _launch(parent: Connection, config: bytes, replicas: range, secret: bytes, log: LogOptions) -> None:
    """The main function of the process."""
    leave_end_to_parent()
    configure_logging(*log)
    try:
        cluster = RayCluster()
        bundle = _needs(unpacked(config)[0], cluster)
    except ValueError as error:
        parent.send(ConfigError(error_text(error)))
        return
    parent.send(cluster.host)
    try:
        address = cluster.host, parent.recv()
        for rank in replicas:
            keep = (cluster, bundle, rank, (config, rank, secret, *address), parent)
            threading.Thread(target=_keep, args=keep, daemon=True).start()
        parent.recv()  # until the parent closes the connection or ends
    except (EOFError, OSError):
        cluster.ray.shutdown()  # ends the actors
        os._exit(0)


def _needs(config: EngineConfig, cluster: RayCluster) -> dict[str, float]:
    if config.cluster.distributed_executor_backend == "ray":
        return _ALONE
    return resources(uses_gpus(config, cluster), config.parallel.ranks)


def _keep(
    cluster: RayCluster, bundle: dict[str, float], rank: int, arguments: tuple[object, ...], parent: Connection
) -> None:
    """Run the actor of a replica, and restart it when it ends."""
    while True:
        try:
            actors = Actors(cluster, [bundle], "PACK")
            actors.run(0, run_replica, *arguments)
            problem = actors.result(0)
            actors.close()
        except RuntimeError as error:
            problem = error
        if isinstance(problem, ValueError):
            parent.send((rank, str(problem)))
            return
        logger.error("The actor of replica %d has ended: %s; placing another", rank, problem)
        time.sleep(_AGAIN_SECONDS)


def run_replica(config: bytes, rank: int, secret: bytes, host: str, port: int) -> None:
    """The function that an actor runs: the core of a replica, for the server at host:port."""
    import ray

    from quire.engine.headless import HeadlessCores

    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # for a core whose ranks are actors
    own, directory = unpacked(config)
    options = replace(
        own.cluster,
        headless=True,
        data_parallel_backend="mp",
        data_parallel_start_rank=rank,
        data_parallel_size_local=1,
        data_parallel_address=host,
        data_parallel_rpc_port=port,
    )
    asyncio.run(HeadlessCores(replace(own, cluster=options), directory, ClusterSecret(secret)).run())
