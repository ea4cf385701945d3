"""A Ray cluster of several nodes on this machine. Tests that use it are skipped where Ray is not installed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest


class Cluster:
    """Nodes with a processor each, and a head without one. address: for RAY_ADDRESS."""

    def __init__(self, nodes: int) -> None:
        self.ray: Any = pytest.importorskip("ray", reason='needs Ray: pip install ".[ray]"')
        from ray.cluster_utils import Cluster as RayNodes

        os.environ.setdefault("RAY_DEDUP_LOGS", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would be sent to Ray's makers
        self._cluster = RayNodes(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes: dict[str, Any] = {}
        for _ in range(nodes):
            self.add_node()
        self.address: str = self._cluster.address
        self.ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")

    def add_node(self) -> None:
        node = self._cluster.add_node(num_cpus=1)
        self._nodes[node.node_id] = node

    def used(self) -> list[str]:
        """The nodes on which something is placed."""
        groups = self.ray.util.placement_group_table().values()
        placed = [group for group in groups if group["state"] == "CREATED"]
        return sorted({node for group in placed for node in group["bundles_to_node_id"].values()})

    def kill_node(self, number: int) -> None:
        """Kill a node with a processor on which something is placed, and all that runs there."""
        used = [node for node in self.used() if node in self._nodes]
        self._cluster.remove_node(self._nodes.pop(used[number]), allow_graceful=False)

    def close(self) -> None:
        self.ray.shutdown()
        self._cluster.shutdown()


@contextlib.contextmanager
def ray_cluster(nodes: int) -> Iterator[Cluster]:
    cluster = Cluster(nodes)
    try:
        yield cluster
    finally:
        cluster.close()
