"""Ranks as threads of one process, so tests try every split of a model in milliseconds."""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.parallel.mesh import Communicator, Exchange
from support.waiting import LONGEST

T = TypeVar("T")


class Meeting:
    """The point at which ranks exchange their tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=LONGEST)
        self.table: list[Any] = [None] * size
        self.sent: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)  # (from, to)


@dataclass(frozen=True)
class Arrival:
    """An exchange. The tensors that other ranks send arrive when they are waited for, and not before."""

    queue: Any
    out: Tensor

    def wait(self) -> None:
        if self.out.numel():
            self.out.copy_(self.queue.get(timeout=LONGEST))


@dataclass(frozen=True)
class ThreadGroup(Communicator):
    """calls: how often each collective was called with a tensor that is not empty. sent: bytes to each other rank."""

    meeting: Any = None
    calls: Counter[str] = field(default_factory=Counter)
    bytes_sent: list[int] = field(default_factory=list)  # to other ranks, by each all-to-all
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def _exchange(self, value: Any) -> list[Any]:
        self.meeting.table[self.rank] = value
        self.meeting.barrier.wait()
        values = list(self.meeting.table)
        self.meeting.barrier.wait()
        return values

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls["all_reduce"] += bool(x.numel())
        total = torch.stack(self._exchange(x.clone())).sum(0)
        return x.copy_(total)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self.calls["reduce_scatter"] += bool(x.numel())
        start, stop = self.share(len(x))
        self.bytes_sent.append(x.nbytes // self.size * (self.size - 1))
        return torch.stack(self._exchange(x.clone())).sum(0)[start:stop]

    def all_gather(self, x: Tensor, total: int) -> Tensor:
        self.calls["all_gather"] += 1
        for other in range(self.size):
            self._count(other, x)
        return torch.cat(self._exchange(x.clone()), dim=-1)[..., :total]

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Exchange:
        self.calls["all_to_all"] += 1
        parts = x.split(list(sent))
        for other, part in enumerate(parts):
            self._count(other, part)
        self.bytes_sent.append(sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank))
        arrived = [of_rank[self.rank] for of_rank in self._exchange([part.clone() for part in parts])]
        assert [len(part) for part in arrived] == list(received)
        return Exchange(torch.cat(arrived))

    def all_gather_rows(self, x: Tensor, total: int) -> Tensor:
        start, stop = self.share(total)
        assert len(x) == stop - start
        self.calls["all_gather_rows"] += bool(total)
        return torch.cat(self._exchange(x.clone()))

    def pass_on(self, x: Tensor, to: int, out: Tensor, source: int) -> Any:
        if x.numel():
            self._count(to, x)
            self.meeting.sent[self.rank, to].put(x.clone())
        return Arrival(self.meeting.sent[source, self.rank], out)

    def _count(self, to: int, x: Tensor) -> None:
        if to != self.rank:
            self.sent[to] += x.nbytes

    def minimum(self, value: int) -> int:
        return min(self._exchange(value))

    def maxima(self, values: Sequence[int]) -> list[int]:
        return [max(of_place) for of_place in zip(*self._exchange(tuple(values)), strict=True)]

    def gather_equal(self, x: Tensor) -> Exchange:
        self.calls["gather_equal"] += 1
        self.bytes_sent.append(x.nbytes * (self.size - 1))
        return Exchange(torch.cat(self._exchange(x.clone())))

    def each(self, value: int) -> tuple[int, ...]:
        return tuple(self._exchange(value))


def on_every_rank(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `work(group)` on `size` ranks. Returns the result of each rank."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, ThreadGroup(rank, size, None, meeting)) for rank in range(size)]
        return results_of(futures, [meeting])


def results_of(ranks: Sequence[Future[T]], meetings: Sequence[Meeting]) -> list[T]:
    """The result of each rank. If one raises an exception, those that wait for it at a meeting give up."""
    wait(ranks, return_when=FIRST_EXCEPTION)
    if all(rank.done() and rank.exception() is None for rank in ranks):
        return [rank.result() for rank in ranks]
    for meeting in meetings:
        meeting.barrier.abort()
    wait(ranks)
    for meeting in meetings:
        meeting.barrier.reset()
    errors = [error for rank in ranks if (error := rank.exception()) is not None]
    raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
