"""Tensor-parallel ranks as threads of one process, so tests try every split of a model in milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.parallel.mesh import Communicator, Exchange

T = TypeVar("T")


class Meeting:
    """The point at which ranks exchange their tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.table: list[Any] = [None] * size


@dataclass(frozen=True)
class ThreadGroup(Communicator):
    meeting: Any = None
    calls: dict[str, int] = field(default_factory=lambda: {"all_reduce": 0, "all_gather": 0, "all_to_all": 0})
    bytes_sent: list[int] = field(default_factory=list)  # to other ranks, by each all-to-all

    def _exchange(self, value: Any) -> list[Any]:
        self.meeting.table[self.rank] = value
        self.meeting.barrier.wait()
        values = list(self.meeting.table)
        self.meeting.barrier.wait()
        return values

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls["all_reduce"] += 1
        total = torch.stack(self._exchange(x.clone())).sum(0)
        return x.copy_(total)

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        self.calls["all_gather"] += 1
        return torch.cat(self._exchange(x.clone()), dim=-1)[..., :total]

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Exchange:
        self.calls["all_to_all"] += 1
        parts = x.split(sent)
        self.bytes_sent.append(sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank))
        arrived = [of_rank[self.rank] for of_rank in self._exchange([part.clone() for part in parts])]
        assert [len(part) for part in arrived] == received
        return Exchange(torch.cat(arrived))

    def minimum(self, value: int) -> int:
        return min(self._exchange(value))


def on_every_rank(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `work(group)` on `size` ranks. Returns the result of each rank."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, ThreadGroup(rank, size, None, meeting)) for rank in range(size)]
        return [future.result() for future in futures]
