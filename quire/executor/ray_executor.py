"""The executor of ranks on a Ray cluster."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.cluster.secret import ClusterSecret
from quire.config.engine import EngineConfig
from quire.executor import messages
from quire.executor.agreement import facts
from quire.executor.multiproc import MultiprocExecutor
from quire.executor.ray_cluster import Actors, RayCluster, portable, resources, unpacked, uses_gpus
from quire.executor.remote_ranks import Agents, RemoteRanks
from quire.messages.errors import error_text
from quire.observability.logging import log_options
from quire.parallel.sizes import MeshSizes


class RayExecutor(MultiprocExecutor):
    """Runs an actor for each rank, which runs the agent of that rank. The actors of a replica are placed on as few
    machines as possible.

    When the executor fails, the core's next executor is placed again, on the remaining machines.
    """

    def _start(self, config: EngineConfig, directory: Path, max_model_len: int, sizes: MeshSizes) -> Any:
        ranks = self._ranks
        path = config.cluster.cluster_secret_file
        cluster = RayCluster()
        gpu = uses_gpus(config, cluster)
        config = replace(config, kernels=replace(config.kernels, device="cuda" if gpu else "cpu"))
        bundle = resources(gpu)
        actors = Actors(cluster, [bundle] * sizes.world, "PACK")
        ranks.at_end(actors.close)
        secret = ClusterSecret.random() if path is None else ClusterSecret.read(path)
        begin = messages.Begin(max_model_len, sizes, actors.machines, log_options())
        agents = Agents(secret, cluster.host, 0, ranks.all, facts(config, directory), begin, ranks)
        ranks.at_end(agents.close)
        shares = [range(rank, rank + 1) for rank in ranks.all]
        ranks.groups += [RemoteRanks(share, agents) for share in shares]
        agents.start()
        packed = portable(config)
        for rank in ranks.all:
            actors.run(rank, run_rank, packed, rank, secret.secret, agents.address, cluster.host)
        actors.watch(lambda rank, problem: ranks.failed(_named(rank, problem)))
        agents.wait(shares, ranks.check)
        return None


def _named(rank: int, problem: Exception) -> Exception:
    return problem if isinstance(problem, ValueError) else RuntimeError(f"rank {rank}: {error_text(problem)}")


def run_rank(config: bytes, rank: int, secret: bytes, address: str, host: str) -> None:
    """The function that an actor runs: the agent of one rank."""
    from quire.executor.agent import Agent

    Agent(*unpacked(config), range(rank, rank + 1), ClusterSecret(secret), address, host).run()
