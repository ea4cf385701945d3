"""The executor of a replica that spans several machines."""

from pathlib import Path
from typing import Any

import torch

from quire.cluster.addresses import interface_variables, resolve
from quire.cluster.secret import ClusterSecret
from quire.config.engine import EngineConfig
from quire.executor import messages
from quire.executor.agreement import facts
from quire.executor.local_ranks import LocalRanks
from quire.executor.multiproc import MultiprocExecutor
from quire.executor.remote_ranks import Agents, RemoteRanks
from quire.observability.logging import log_options
from quire.parallel.sizes import MeshSizes


class NodesExecutor(MultiprocExecutor):
    """The first of `nnodes` machines runs this executor and an equal share of the ranks. Each other machine runs an
    agent with the next ranks. The executor waits for the agents, and fails when one is lost."""

    def _start(self, config: EngineConfig, directory: Path, max_model_len: int, sizes: MeshSizes) -> Any:
        ranks = self._ranks
        machines = config.layout.machines
        options = config.cluster
        assert options.cluster_secret_file is not None
        count = sizes.world // machines
        shares = [range(number * count, (number + 1) * count) for number in range(machines)]
        numbers = [number for number, share in enumerate(shares) for _ in share]
        host = resolve(options.master_addr)
        secret = ClusterSecret.read(options.cluster_secret_file)
        others = range(count, sizes.world)
        agents = Agents(secret, host, options.master_port, others, facts(config, directory), ranks)
        ranks.at_end(agents.close)
        here = LocalRanks(shares[0], ranks)
        ranks.groups += [here, *(RemoteRanks(share, agents) for share in shares[1:])]
        log = log_options()
        agents.start(messages.Begin(max_model_len, sizes, agents.address, log, numbers))
        threads = max(1, torch.get_num_threads() // count)
        start = messages.Start(
            config, str(directory), max_model_len, sizes, agents.address, threads, log, (0, count), numbers
        )
        here.start(start, secret.secret, interface_variables(host))
        agents.wait(shares, ranks.check)
        return None
