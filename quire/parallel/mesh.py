"""Who shares what with whom: the process groups of a model that is split over processes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that split every layer between them. With one rank, every collective is the identity."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def share(self, total: int) -> tuple[int, int]:
        """This rank's [start, stop) of `total` rows, in equal parts, the last ones short or empty."""
        part = -(-total // self.size)
        return min(self.rank * part, total), min((self.rank + 1) * part, total)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.size > 1 and x.numel():
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        """Concatenate the ranks' parts along the last dimension; `total` is its whole size. x: [rows, part]."""
        if self.size == 1:
            return x
        part = -(-total // self.size)
        mine = x if x.shape[-1] == part else torch.nn.functional.pad(x, (0, part - x.shape[-1]))
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)[..., :total]

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' values, so that all decide alike."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self.group)
        return int(tensor)


def join(rank: int, size: int, address: str) -> TensorGroup:
    """Join the ranks that meet at `address` (tcp://host:port or file:///path). Gloo: the CPU's collectives."""
    if size == 1:
        return TensorGroup()
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    return TensorGroup(rank, size, dist.group.WORLD)
