"""Exchanges with a fixed capacity give the results of a layer that has all experts, and never lose a token.

DeepEP and torch's NVSHMEM ops run on GPUs only. Here, threads take their place: they check the arguments as the real
ones do, and move rows as their documentation describes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from test_moe import CASES, EXPERTS, HIDDEN, NAMES, SIZE, TOP_K
from torch import Tensor

from quire.config.engine import ConfigError
from quire.layers.deep_ep_low_latency import open_low_latency_buffer
from quire.layers.moe import MoE
from quire.layers.specs import MoESpec
from quire.layers.symmetric_dispatch import SymmetricBuffer
from quire.parallel.experts import ExpertRanks, StepCapacity
from quire.parallel.mesh import Communicator
from support.layers import build_layer, draw
from support.thread_group import Meeting, ThreadGroup, on_every_rank

MOST = 8  # the largest fixed capacity in these tests
RANKS = 3  # 8 experts in 9 slots: one has two copies
CLOSE = {"rtol": 1e-4, "atol": 1e-3}


class LowLatencyBuffer:
    """The documented behaviour of the low-latency functions of DeepEP's Buffer."""

    def __init__(self, group: ThreadGroup) -> None:
        self.group = group

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = True,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, ...]:
        room, size = num_max_dispatch_tokens_per_rank, self.group.size
        assert x.is_contiguous()
        assert x.shape[0] == topk_idx.shape[0] <= room
        assert topk_idx.dtype is torch.int64
        assert topk_idx.is_contiguous()
        assert bool((topk_idx < num_experts).all())
        assert not use_fp8
        assert not async_finish
        assert return_recv_hook
        table = self.group._exchange((x.clone(), topk_idx.clone()))
        count = num_experts // size
        received = torch.full((count, size * room, x.shape[1]), float("nan"))
        counts = torch.zeros(count, dtype=torch.int32)
        sources: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
        for rank, (rows, slots) in enumerate(table):
            for token, choice in (slots // count == self.group.rank).nonzero().tolist():
                slot = int(slots[token, choice]) % count
                received[slot, counts[slot]] = rows[token]
                counts[slot] += 1
                sources[slot].append((rank, token, choice))
        empty = torch.full_like(received, float("nan"))

        def hook() -> None:
            empty.copy_(received)

        return empty, counts, (sources, room), None, hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Any,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Any, ...]:
        sources, room = handle
        assert x.shape[:2] == (len(sources), self.group.size * room)
        assert topk_weights.dtype is torch.float32
        assert topk_weights.shape == topk_idx.shape
        assert return_recv_hook
        results = {
            source: x[slot, row].clone() for slot, of_slot in enumerate(sources) for row, source in enumerate(of_slot)
        }
        combined = torch.zeros(len(topk_idx), x.shape[2])
        for of_rank in self.group._exchange(results):
            for (rank, token, choice), result in of_rank.items():
                if rank == self.group.rank:
                    combined[token] += topk_weights[token, choice] * result
        return combined, None, lambda: None


class VectorOps:
    """The documented behaviour of torch's all_to_all_vdev_2d and all_to_all_vdev_2d_offset."""

    def __init__(self) -> None:
        self.groups: dict[str, ThreadGroup] = {}
        self.shared: list[Tensor] = []  # tensors that were exchanged at a rendezvous

    def check(self, group: ThreadGroup, *tensors: Tensor) -> None:
        for tensor in tensors:
            assert any(tensor is shared for shared in self.shared), "not in symmetric memory"
            assert tensor.is_contiguous()
        given, out, *splits = tensors
        assert given.dtype is out.dtype
        assert given.stride(0) == out.stride(0)
        assert all(of.dtype is torch.int64 for of in splits)
        assert splits[-1].shape == (2, splits[0].shape[-1])
        assert not splits[-1].shape[1] % group.size

    def forth(self, given: Tensor, out: Tensor, in_splits: Tensor, out_places: Tensor, name: str) -> None:
        group = self.groups[name]
        self.check(group, given, out, in_splits, out_places)
        count = len(in_splits) // group.size
        assert in_splits.sum() <= len(given)
        table = group._exchange((given.clone(), in_splits.clone()))
        end, splits, offsets = 0, [], []
        for slot in range(group.rank * count, (group.rank + 1) * count):
            for rows, of_rank in table:
                start, size = int(of_rank[:slot].sum()), int(of_rank[slot])
                out[end : end + size] = rows[start : start + size]
                splits.append(size)
                offsets.append(end)
                end += size
        assert end <= len(out), "overflow"
        out[end:] = float("nan")
        out_places.copy_(torch.tensor([splits, offsets]))

    def back(self, given: Tensor, out: Tensor, in_places: Tensor, out_places: Tensor, name: str) -> None:
        group = self.groups[name]
        self.check(group, given, out, in_places, out_places)
        count = in_places.shape[1] // group.size
        table = group._exchange((given.clone(), in_places.clone()))
        end, splits, offsets = 0, [], []
        for rows, places in table:
            for slot in range(count):
                size, start = places[:, slot * group.size + group.rank].tolist()
                out[end : end + size] = rows[start : start + size]
                splits.append(size)
                offsets.append(end)
                end += size
        out_places.copy_(torch.tensor([splits, offsets]))


class Named:
    """A process group, of which only the name is read."""

    def __init__(self, name: str) -> None:
        self.group_name = name


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> VectorOps:
    ops = VectorOps()
    monkeypatch.setattr(symmetric_memory, "is_nvshmem_available", lambda: True)
    monkeypatch.setattr(symmetric_memory, "set_backend", lambda name: None)
    monkeypatch.setattr(symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda tensor, name: ops.shared.append(tensor))
    monkeypatch.setattr(torch.ops.symm_mem, "all_to_all_vdev_2d", ops.forth)
    monkeypatch.setattr(torch.ops.symm_mem, "all_to_all_vdev_2d_offset", ops.back)
    return ops


def named(ops: VectorOps, group: ThreadGroup) -> ThreadGroup:
    """The group under a name, which each thread must have for itself here."""
    name = f"rank {group.rank}"
    ops.groups[name] = group
    return ThreadGroup(group.rank, group.size, Named(name), group.meeting, bytes_sent=group.bytes_sent)  # type: ignore[arg-type]


def ranks_of(backend: Any, group: ThreadGroup, ops: VectorOps, redundant: int = 0) -> ExpertRanks:
    capacity = StepCapacity(group, MOST)
    ranks = ExpertRanks(group, False, redundant)
    slots = len(ranks.first_slots(EXPERTS))
    buffer: Any = None
    if backend == "deepep_low_latency":
        buffer = LowLatencyBuffer(group)
    elif backend == "symmetric_memory":
        cpu = torch.device("cpu")
        buffer = SymmetricBuffer(named(ops, group), torch.float32, cpu, HIDDEN, slots, TOP_K, MOST)
    return ExpertRanks(group, False, redundant, backend=backend, buffer=buffer, capacity=capacity)


BACKENDS = ["allgather_reducescatter", "deepep_low_latency", "symmetric_memory"]


def results(
    backend: str, ops: VectorOps, spec: MoESpec, kernels: str, tokens: list[Tensor]
) -> list[tuple[Tensor, int]]:
    """The results of each rank, and the capacity in this step."""

    def work(group: ThreadGroup) -> tuple[Tensor, int]:
        ranks = ranks_of(backend, group, ops, redundant=1)
        layer, _ = build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES), kernels, experts=ranks)
        assert ranks.capacity is not None
        x = tokens[group.rank].clone()
        ranks.capacity.agree(len(x), 1)
        return layer(x), ranks.capacity.tokens

    return on_every_rank(len(tokens), work)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_with_a_fixed_capacity_get_what_one_rank_gets(name, kernels, backend, ops):
    spec = MoESpec(EXPERTS, TOP_K, SIZE, **CASES[name])
    whole, _ = build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES), kernels)
    tokens = [draw(f"tokens of rank {rank}", (rank * 5) % 7, HIDDEN) for rank in range(RANKS)]
    for x, (result, capacity) in zip(tokens, results(backend, ops, spec, kernels, tokens), strict=True):
        assert capacity == 5
        torch.testing.assert_close(result, whole(x), **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_lost_if_all_tokens_of_all_ranks_choose_the_same_experts(backend, ops):
    """The worst case: each rank has as many tokens as fit, and one rank gets all of them."""
    spec = MoESpec(EXPERTS, TOP_K, SIZE)
    whole, _ = build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES))
    tokens = [draw("a token", 1, HIDDEN).repeat(MOST, 1)] * RANKS
    for result, capacity in results(backend, ops, spec, "reference", tokens):
        assert capacity == MOST
        torch.testing.assert_close(result, whole(tokens[0]), **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_is_too_large_on_one_rank_is_exchanged_by_counts_on_all(backend, ops):
    spec = MoESpec(EXPERTS, TOP_K, SIZE)
    whole, _ = build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES))
    tokens = [draw(f"tokens of rank {rank}", size, HIDDEN) for rank, size in enumerate((2, MOST + 1, 0))]
    for x, (result, capacity) in zip(tokens, results(backend, ops, spec, "reference", tokens), strict=True):
        assert not capacity
        torch.testing.assert_close(result, whole(x), **CLOSE)


def test_ranks_of_a_tensor_group_send_each_token_once(ops):
    """Two replicas of two ranks each: the ranks of a replica have the same tokens, of which each sends a half."""
    spec = MoESpec(EXPERTS, TOP_K, SIZE)
    whole, _ = build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES))
    tokens = [draw("first", 7, HIDDEN), draw("second", 4, HIDDEN)]
    pairs = [Meeting(2), Meeting(2)]

    def work(everyone: ThreadGroup) -> tuple[Tensor, list[int]]:
        number, rank = divmod(everyone.rank, 2)
        ranks = ranks_of("allgather_reducescatter", everyone, ops)
        pair = ThreadGroup(rank, 2, None, pairs[number])
        layer, _ = build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES), "reference", pair, ranks)
        assert ranks.capacity is not None
        ranks.capacity.agree(len(tokens[number]), 0)
        return layer(tokens[number].clone()), everyone.bytes_sent

    found = on_every_rank(4, work)
    for number, x in enumerate(tokens):
        (first, _), (second, _) = found[2 * number : 2 * number + 2]
        torch.testing.assert_close(first + second, whole(x), **CLOSE)
    # room for 4 of 7 tokens: each with its slots and weights to 3 ranks, and the sums of other ranks' tokens back
    assert all(sent == [3 * 4 * (HIDDEN + 2 * TOP_K) * 4, 3 * 4 * HIDDEN * 4] for _, sent in found)


def test_all_ranks_agree_on_the_largest_step():
    def work(group: ThreadGroup) -> tuple[tuple[int, int], int]:
        capacity = StepCapacity(group, MOST)
        return capacity.agree(*steps[group.rank]), capacity.tokens

    steps: list[tuple[int, int]] = [(3, 1), (5, 1)]
    assert on_every_rank(2, work) == [((5, 1), 5)] * 2
    steps = [(8, 4), (5, 1)]
    assert on_every_rank(2, work) == [((8, 0), 8)] * 2
    steps = [(9, 0), (1, 1)]
    assert on_every_rank(2, work) == [((9, 0), 0)] * 2


def test_kernels_that_are_missing_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="DeepEP's package deep_ep cannot be imported"):
        open_low_latency_buffer(Communicator(), HIDDEN, EXPERTS, MOST)

    def buffer(size: int, slots: int) -> Callable[[], Any]:
        group = Communicator(0, size)
        cpu = torch.device("cpu")
        return lambda: SymmetricBuffer(group, torch.float32, cpu, HIDDEN, slots, TOP_K, MOST)

    with pytest.raises(ConfigError, match="needs NVSHMEM, which torch does not find"):
        buffer(2, 16)()
    with pytest.raises(ConfigError, match="at most 32 ranks with 32 experts each, but 2 ranks have 40"):
        buffer(2, 80)()
