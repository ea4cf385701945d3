"""The mesh of a first rank before any rank is started, used to plan what it will execute."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from quire.parallel.mesh import Communicator, Mesh, backend
from quire.parallel.sizes import AXES, MeshSizes


@dataclass(frozen=True)
class PlannedGroup(Communicator):
    """A group whose other ranks do not run. Their values are assumed to equal those of this rank. It cannot exchange
    tensors."""

    def _agree(self, value: int, operation: dist.ReduceOp.RedOpType) -> int:
        return value * self.size if operation == dist.ReduceOp.SUM else value

    def maxima(self, values: Sequence[int]) -> list[int]:
        return list(values)


def planned_mesh(sizes: MeshSizes, kind: str, can_share_memory: bool) -> Mesh:
    """Return the mesh of rank 0.

    kind: of the devices, "cpu" or "cuda". can_share_memory: whether the tensor-parallel ranks are processes of one
    machine with compiled kernels, see with_shared_sums.
    """
    has_nccl = kind == "cuda" and backend(kind, sizes.replica).endswith("nccl")
    groups: dict[str, Any] = {}
    for axis in AXES:
        size = len(sizes.groups(axis)[0])
        if size > 1:
            shares = kind == "cpu" and axis == "tp" and can_share_memory
            groups[axis] = PlannedGroup(0, size, capturable=has_nccl or shares)
    return Mesh(0, size=sizes.world, **groups)
