"""The arithmetic of a mesh of ranks with named axes: which ranks form which group. It does not import torch.

Ranks are numbered with the last axis running fastest. dp=2 and tp=2 make four ranks:

             tp 0     tp 1
    dp 0    rank 0   rank 1
    dp 1    rank 2   rank 3

Ranks 0 and 1 split every layer of one replica (tp). Ranks 0 and 2 hold the same part of two replicas (dp). The experts
of a layer may be distributed over all four (ep).
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Self

import msgspec
import numpy as np

from quire.config.engine import ParallelConfig

# For each kind of group, the axes along which the ranks of a group differ. Experts (ep) are distributed over all ranks
# that hold the same layers. All ranks of a replica run the same steps. The dcp groups are parts of the tp groups.
AXES = {
    "dp": ("dp",),
    "pp": ("pp",),
    "cp": ("cp",),
    "tp": ("tp",),
    "ep": ("dp", "cp", "tp"),
    "replica": ("pp", "cp", "tp"),
    "dcp": (),
}


class MeshSizes(msgspec.Struct, frozen=True):
    """The number of ranks along each axis and in each dcp group."""

    dp: int = 1  # data parallel: replicas of the model
    pp: int = 1  # pipeline parallel: ranges of layers
    cp: int = 1  # context parallel: shares of the tokens of every sequence
    tp: int = 1  # tensor parallel: parts of every layer
    dcp: int = 1  # decode context parallel: consecutive tensor-parallel ranks that divide the cached tokens

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The number of ranks along each axis."""
        return self.dp, self.pp, self.cp, self.tp

    @classmethod
    def of(cls, options: ParallelConfig) -> Self:
        """Return the mesh of one replica, or of all replicas if they share experts."""
        replicas = options.data_parallel_size if options.shares_experts else 1
        return cls(
            replicas,
            options.pipeline_parallel_size,
            options.prefill_context_parallel_size,
            options.tensor_parallel_size,
            options.decode_context_parallel_size,
        )

    @property
    def world(self) -> int:
        """The total number of ranks."""
        return math.prod(self.shape)

    @property
    def replica(self) -> int:
        """The number of ranks of one replica."""
        return self.world // self.dp

    def groups(self, axis: str) -> list[list[int]]:
        """Return the ranks of every group of a kind (dp, pp, cp, tp, ep, replica or dcp), in the order of their numbers
        in the group.

        MeshSizes(dp=2, tp=2).groups("dp") -> [[0, 2], [1, 3]]
        """
        ranks = np.arange(self.world).reshape(self.shape)
        if axis == "dcp":
            consecutive: list[list[int]] = ranks.reshape(-1, self.dcp).tolist()
            return consecutive
        dims = [self.__struct_fields__.index(name) for name in AXES[axis]]
        size = math.prod(ranks.shape[dim] for dim in dims)
        groups: list[list[int]] = np.moveaxis(ranks, dims, range(-len(dims), 0)).reshape(-1, size).tolist()
        return groups


def balanced(costs: Sequence[int], stages: int) -> list[int]:
    """Divide layers, in order, among stages so that the most expensive stage costs as little as possible, and the
    others about the same.

    costs: of each layer. Returns the number of layers of each stage, at least 1. Raises ValueError if there are more
    stages than layers.
    """
    count = len(costs)
    sums = [0, *accumulate(costs)]
    if stages > count:
        raise ValueError(f"pipeline_parallel_size={stages} is too large: the model can have {count} stages")
    # best[n]: the best division of the first n layers into the stages so far: (cost of the most expensive stage, sum of
    # the squares, layers of each stage)
    best = [(sums[n], sums[n] ** 2, [n]) for n in range(count + 1)]
    for stage in range(1, stages):
        best = [
            min(
                (max(most, sums[n] - sums[m]), squares + (sums[n] - sums[m]) ** 2, [*sizes, n - m])
                for m, (most, squares, sizes) in enumerate(best[:n])
                if len(sizes) == stage and min(sizes) > 0
            )
            if n > stage
            else (0, 0, [])
            for n in range(count + 1)
        ]
    return best[count][2]


def balanced_parts(parts: Sequence[range], costs: Sequence[int], stages: int) -> list[int]:
    """Divide parts of several layers among stages as `balanced` divides layers. costs: of each part. Returns the number
    of layers of each stage. Raises ValueError if there are more stages than parts."""
    sizes = iter(map(len, parts))
    return [sum(next(sizes) for _ in range(count)) for count in balanced(costs, stages)]
