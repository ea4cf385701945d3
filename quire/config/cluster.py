"""The options of clusters: which part of an engine runs on which machine."""

from dataclasses import dataclass
from typing import Literal

from quire.config.declaration import ConfigError, at_least, option


@dataclass(frozen=True)
class Layout:
    """The placement of replicas and ranks, from the perspective of one machine. served: the replicas to which this
    machine's server sends requests; empty without a server. here: the replicas whose cores run on this machine.
    machines: the number of machines that share one replica. machine: the number of this one among them; only number 0
    runs the core.
    """

    served: range
    here: range
    machines: int = 1
    machine: int = 0

    @property
    def elsewhere(self) -> range:
        """The served replicas whose cores run on other machines."""
        return range(self.here.stop, self.served.stop) if self.served else range(0)


@dataclass(frozen=True)
class ClusterConfig:
    """Several machines."""

    distributed_executor_backend: Literal["mp", "ray"] = "mp"
    nnodes: int = option(1, flags=("-n",))
    node_rank: int = option(0, flags=("-r",))
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    headless: bool = False
    data_parallel_size_local: int | None = option(None, flags=("-dpl",))
    data_parallel_start_rank: int | None = option(None, flags=("-dpr",))
    data_parallel_rank: int | None = option(None, flags=("-dpn",))
    data_parallel_address: str | None = option(None, flags=("-dpa",))
    data_parallel_rpc_port: int = option(29550, flags=("-dpp",))
    data_parallel_backend: Literal["mp", "ray"] = option("mp", flags=("-dpb",))
    data_parallel_hybrid_lb: bool = option(False, flags=("-dph",))
    data_parallel_external_lb: bool = option(False, flags=("-dpe",))
    cluster_secret_file: str | None = None

    def __post_init__(self) -> None:
        at_least(self, 1, "nnodes", "master_port", "data_parallel_rpc_port")
        at_least(self, 0, "node_rank", "data_parallel_size_local", "data_parallel_start_rank", "data_parallel_rank")
        for name in ("master_port", "data_parallel_rpc_port"):
            if getattr(self, name) > 65535:
                raise ConfigError(f"{name} must be at most 65535, got {getattr(self, name)}")
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"node_rank={self.node_rank} must be less than nnodes={self.nnodes}; machines are numbered from 0"
            )

    @property
    def uses_ray(self) -> bool:
        return "ray" in (self.distributed_executor_backend, self.data_parallel_backend)

    @property
    def head_address(self) -> str:
        """The address of the machine whose server serves all replicas."""
        return self.data_parallel_address or self.master_addr

    def layout(self, replicas: int, ranks: int) -> Layout:
        """Return the placement of the engine's parts. ranks: of one replica. Raises ConfigError for contradictory
        options."""
        layout = self._layout(replicas, ranks)
        start = layout.here.start
        stop = layout.here.stop
        if stop > replicas:
            raise ConfigError(
                f"data_parallel_size={replicas}: there is no replica {stop - 1}, which this machine would "
                "have by data_parallel_rank, or data_parallel_start_rank and data_parallel_size_local"
            )
        if self.node_rank > 0 and layout.served and not self._balances_elsewhere:
            raise ConfigError(f"node_rank={self.node_rank}: only the machine with number 0 has a server; add headless")
        if self.headless and not (layout.machine or start or self.data_parallel_size_local is not None):
            raise ConfigError(
                "headless: say which part of the engine this machine has, with nnodes and node_rank, or "
                "with data_parallel_start_rank and data_parallel_size_local"
            )
        return layout

    def check_secret(self, layout: Layout, exchanges: bool) -> None:
        """Raises ConfigError if machines or engines would have to trust each other without a secret.

        exchanges: whether the engine exchanges KV blocks only with others that have the secret."""
        needs_secret = self.headless or layout.machines > 1 or (layout.elsewhere and self.data_parallel_backend == "mp")
        if needs_secret and self.cluster_secret_file is None:
            raise ConfigError(
                "cluster_secret_file is missing: machines that share an engine need a common secret; "
                "make one with: (umask 077; openssl rand -hex 32 > FILE), and copy it to all"
            )
        if exchanges and self.cluster_secret_file is None:
            raise ConfigError(
                "kv_transfer_config needs cluster_secret_file, by which engines know each other; make "
                "one with: (umask 077; openssl rand -hex 32 > FILE), and give it to all. If you trust everyone in a "
                "private network, use insecure_transfers instead"
            )

    @property
    def _balances_elsewhere(self) -> bool:
        """Whether an external load balancer distributes requests among several servers, each with some of the
        replicas."""
        return bool(
            self.data_parallel_external_lb
            or self.data_parallel_rank is not None
            or self.data_parallel_hybrid_lb
            or (self.data_parallel_start_rank and not self.headless)
        )

    def _layout(self, replicas: int, ranks: int) -> Layout:
        on_each, rest = divmod(replicas * ranks, self.nnodes)
        if rest:
            raise ConfigError(
                f"nnodes={self.nnodes}: {replicas * ranks} ranks cannot be divided equally among so many machines"
            )
        if on_each < ranks:
            return self._spanning(ranks // on_each, ranks % on_each)
        if on_each % ranks:
            raise ConfigError(f"nnodes={self.nnodes}: each machine must have whole replicas, of {ranks} ranks each")
        count = on_each // ranks
        start = self.node_rank * on_each // ranks
        if self.data_parallel_external_lb or self.data_parallel_rank is not None:
            return self._single_replica(start)
        if self.data_parallel_backend == "ray":
            return Layout(range(replicas), range(0))
        if self.data_parallel_size_local is not None:
            count = self.data_parallel_size_local
        elif self.data_parallel_hybrid_lb and self.nnodes == 1:
            raise ConfigError(
                "data_parallel_hybrid_lb: say how many replicas this server has, with data_parallel_size_local"
            )
        if self.headless or self._balances_elsewhere:
            start = start if self.data_parallel_start_rank is None else self.data_parallel_start_rank
            here = range(start, start + count)
            return Layout(range(0) if self.headless else here, here)
        return Layout(range(replicas), range(count))

    def _single_replica(self, start: int) -> Layout:
        """Return the layout of a server with one replica: data_parallel_rank, or the first of this machine."""
        if self.data_parallel_rank is None and self.nnodes == 1:
            raise ConfigError("data_parallel_external_lb: say which replica this server has, with data_parallel_rank")
        rank = start if self.data_parallel_rank is None else self.data_parallel_rank
        return Layout(range(rank, rank + 1), range(rank, rank + 1))

    def _spanning(self, machines: int, rest: int) -> Layout:
        """Return the layout of a replica that several machines share."""
        if rest:
            raise ConfigError(f"nnodes={self.nnodes}: the machines must have equally many ranks")
        if self.node_rank > 0:
            return Layout(range(0 if self.headless else 1), range(0), machines, self.node_rank)
        return Layout(range(1), range(1), machines)
