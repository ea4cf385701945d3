"""The executor of ranks on a Ray cluster."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from quire.cluster.secret import ClusterSecret
from quire.config.engine import EngineConfig
from quire.executor import messages
from quire.executor.agreement import facts
from quire.executor.multiproc import MultiprocExecutor
from quire.executor.ray_cluster import PLACE_SECONDS, Actors, RayCluster, portable, resources, unpacked, uses_gpus
from quire.executor.remote_ranks import Agents, RemoteRanks
from quire.messages.engine import RendezvousPlace
from quire.messages.errors import error_text
from quire.observability.logging import log_options
from quire.parallel.mesh import connect_store
from quire.parallel.sizes import MeshSizes

_MEETING = "the ranks' meeting"  # a key of the store at which the cores meet
_MEETING_SECONDS = 2 * PLACE_SECONDS  # the longest time until replica 0 has its machines


class RayExecutor(MultiprocExecutor):
    """Runs an actor for each rank, which runs the agent of that rank. The actors of a replica are placed on as few
    machines as possible.

    When the executor fails, the core's next executor is placed again, on the remaining machines.
    """

    def _start(self, config: EngineConfig, directory: Path, max_model_len: int, sizes: MeshSizes) -> Any:
        ranks = self._ranks
        cluster = RayCluster()
        gpu = uses_gpus(config, cluster)
        config = replace(config, kernels=replace(config.kernels, device="cuda" if gpu else "cpu"))
        bundle = resources(gpu)
        actors = Actors(cluster, [bundle] * sizes.replica, "PACK")
        ranks.at_end(actors.close)
        secret = self._secret(config)
        agents = Agents(secret, cluster.host, 0, ranks.all, facts(config, directory), ranks)
        ranks.at_end(agents.close)
        shares = [range(rank, rank + 1) for rank in ranks.all]
        ranks.groups += [RemoteRanks(share, agents) for share in shares]
        place = self._meeting(agents)
        log = log_options()
        agents.start(
            messages.Begin(max_model_len, sizes, place.address, log, actors.machines, place.replica, place.generation)
        )
        packed = portable(config)
        for rank in ranks.all:
            actors.run(rank, run_rank, packed, rank, secret.secret, agents.address, cluster.host)
        actors.watch(lambda rank, problem: ranks.failed(_named(rank, problem)))
        agents.wait(shares, ranks.check)
        return None

    def _secret(self, config: EngineConfig) -> ClusterSecret:
        """Return the secret of all connections of the ranks. Raises ConfigError."""
        if self._place is not None:
            return ClusterSecret(self._place.key)
        path = config.cluster.cluster_secret_file
        return ClusterSecret.random() if path is None else ClusterSecret.read(path)

    def _meeting(self, agents: Agents) -> RendezvousPlace:
        """Return the rendezvous of the ranks, which all machines can reach. If replicas share experts and their cores
        are on one machine, it is at the agents of replica 0."""
        place = self._place
        if place is None:
            return RendezvousPlace(0, agents.address, "")
        if place.is_head:
            return place
        store = connect_store(place.address)
        if place.replica == 0:
            store.set(_MEETING, agents.address)
        store.wait([_MEETING], timedelta(seconds=_MEETING_SECONDS))
        return msgspec.structs.replace(place, address=store.get(_MEETING).decode())


def _named(rank: int, problem: Exception) -> Exception:
    return problem if isinstance(problem, ValueError) else RuntimeError(f"rank {rank}: {error_text(problem)}")


def run_rank(config: bytes, rank: int, secret: bytes, address: str, host: str) -> None:
    """The function that an actor runs: the agent of one rank."""
    from quire.executor.agent import Agent

    Agent(*unpacked(config), range(rank, rank + 1), ClusterSecret(secret), address, host).run()
