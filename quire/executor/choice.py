"""Chooses the executor of a core."""

from pathlib import Path

from quire.config.engine import EngineConfig
from quire.executor.base import Executor
from quire.executor.multiproc import MultiprocExecutor
from quire.executor.uniproc import UniprocExecutor
from quire.messages.engine import RendezvousPlace
from quire.worker.device import on_gpu


def uses_gpu(config: EngineConfig) -> bool:
    """Whether the steps of a core run on GPUs, on any machine. Raises ConfigError if the options require a GPU and
    there is none."""
    if config.cluster.distributed_executor_backend == "ray":
        from quire.executor.ray_cluster import RayCluster, uses_gpus

        return uses_gpus(config, RayCluster())
    return on_gpu(config.kernels.device)


def make_executor(
    config: EngineConfig, directory: Path, max_model_len: int, place: RendezvousPlace | None = None
) -> Executor:
    """Return the executor for the options, with the model loaded. Raises ConfigError or ValueError.

    place: the rendezvous of replicas that share experts, None for a replica that shares none.
    """
    if config.cluster.distributed_executor_backend == "ray":
        from quire.executor.ray_executor import RayExecutor

        return RayExecutor(config, directory, max_model_len, place)
    if config.layout.machines > 1:
        from quire.executor.nodes_executor import NodesExecutor

        return NodesExecutor(config, directory, max_model_len)
    kind = MultiprocExecutor if config.parallel.ranks > 1 else UniprocExecutor
    return kind(config, directory, max_model_len, place)
