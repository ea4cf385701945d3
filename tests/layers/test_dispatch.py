"""Experts that are dealt to ranks give the results of a layer that has them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_moe import CASES, EXPERTS, HIDDEN, NAMES, SIZE, TOP_K, X
from torch import Tensor

from quire.config.engine import ConfigError
from quire.layers.build import Builder
from quire.layers.deep_ep import open_buffer
from quire.layers.dispatch import DealtExperts
from quire.layers.moe import MoE
from quire.layers.specs import MoESpec
from quire.parallel.experts import ExpertRanks
from quire.parallel.mesh import Communicator
from support.layers import build_layer, draw
from support.thread_group import ThreadGroup, on_every_rank


def layer_of(group: ThreadGroup, spec: MoESpec, kernels: str, replicated: bool, redundant: int = 0) -> MoE:
    """A rank's part of the layer. If replicated, the ranks are a tensor group, too."""
    tensor_group = group if replicated else Communicator()
    ranks = ExpertRanks(group, replicated, redundant)
    return build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES), kernels, tensor_group, ranks)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_ranks_with_the_same_tokens_add_up_what_their_experts_compute(name, size):
    """With 3 ranks, 8 experts have 9 slots, so one of them has two copies."""
    spec = MoESpec(EXPERTS, TOP_K, SIZE, **CASES[name])
    whole, _ = build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES))
    if size == 8 and spec.shared is not None:
        size = 6  # the shared expert has 12 elements, of which each rank needs some
    summands = on_every_rank(size, lambda group: layer_of(group, spec, "reference", True)(X.clone()))
    torch.testing.assert_close(sum(summands), whole(X), rtol=1e-4, atol=1e-3)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_exchange_tokens_get_what_one_rank_gets(name, size, kernels):
    """Each has other tokens, and some have none. With the C++ kernels, all bits are equal."""
    spec = MoESpec(EXPERTS, TOP_K, SIZE, **CASES[name])
    whole, _ = build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES), kernels)
    tokens = [draw(f"tokens of rank {rank}", (rank * 5) % 7, HIDDEN) for rank in range(size)]

    def work(group: ThreadGroup) -> Tensor:
        return layer_of(group, spec, kernels, False, redundant=3)(tokens[group.rank].clone())

    exact = {"rtol": 0, "atol": 0} if kernels == "cpu" else {"rtol": 1e-4, "atol": 1e-3}
    for x, result in zip(tokens, on_every_rank(size, work), strict=True):
        torch.testing.assert_close(result, whole(x), **exact)


class Event:
    def current_stream_wait(self) -> None:
        """Everything has happened."""


@dataclass
class DeepEPBuffer:
    """What DeepEP's Buffer does, as its documentation says, among ranks that are threads."""

    group: ThreadGroup

    def get_dispatch_layout(self, slots: Tensor, num_slots: int) -> tuple[Any, ...]:
        self.count = num_slots // self.group.size
        ranks = range(self.group.size)
        is_sent = torch.stack([(slots // self.count == rank).any(1) for rank in ranks], 1)
        return is_sent.sum(0).int(), None, slots.flatten().bincount(minlength=num_slots).int(), is_sent, Event()

    def dispatch(self, x: Tensor, **given: Any) -> tuple[Any, ...]:
        is_sent, slots, weights = given["is_token_in_rank"], given["topk_idx"], given["topk_weights"]
        table = self.group._exchange((x.clone(), is_sent, slots, weights))
        picked = [of_rank[1][:, self.group.rank].nonzero()[:, 0] for of_rank in table]
        received = [torch.cat([of[i][rows] for of, rows in zip(table, picked, strict=True)]) for i in (0, 2, 3)]
        here = received[1] - self.group.rank * self.count
        here[(here < 0) | (here >= self.count)] = -1
        handle = [len(rows) for rows in picked], is_sent
        return received[0], here, received[2], [], handle, Event()

    def combine(self, x: Tensor, handle: Any, async_finish: bool) -> tuple[Any, ...]:
        counts, is_sent = handle
        table = self.group._exchange(x.split(counts))
        total = torch.zeros(len(is_sent), x.shape[1], dtype=x.dtype)
        for rank, parts in enumerate(table):
            total[is_sent[:, rank]] += parts[self.group.rank]
        return total, None, Event()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_ranks_that_exchange_tokens_with_deep_ep_get_what_one_rank_gets(name, kernels):
    spec = MoESpec(EXPERTS, TOP_K, SIZE, **CASES[name])
    whole, _ = build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES), kernels)
    tokens = [draw(f"tokens of rank {rank}", (rank * 5) % 7, HIDDEN) for rank in range(3)]

    def work(group: ThreadGroup) -> Tensor:
        ranks = ExpertRanks(group, False, backend="deepep_high_throughput", buffer=DeepEPBuffer(group))
        layer, _ = build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES), kernels, experts=ranks)
        return layer(tokens[group.rank].clone())

    for x, result in zip(tokens, on_every_rank(3, work), strict=True):
        torch.testing.assert_close(result, whole(x), rtol=1e-4, atol=1e-3)


def test_deep_ep_is_refused_where_it_is_not_installed():
    with pytest.raises(ConfigError, match="all2all_backend: DeepEP's package deep_ep cannot be imported"):
        open_buffer(Communicator(), torch.bfloat16, torch.device("cuda"), HIDDEN)


def test_ranks_of_a_tensor_group_send_each_token_once():
    """Two replicas of two ranks each: the ranks of a replica have the same tokens, of which each sends a half."""
    spec = MoESpec(EXPERTS, TOP_K, SIZE)
    whole, _ = build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES))
    tokens = [draw("first", 7, HIDDEN), draw("second", 4, HIDDEN)]

    def replica(number: int, pair: ThreadGroup, four: list[ThreadGroup]) -> tuple[Tensor, int]:
        group = four[2 * number + pair.rank]
        ranks = ExpertRanks(group, False)
        layer, _ = build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES), "reference", pair, ranks)
        return layer(tokens[number].clone()), group.bytes_sent[1]

    def work(everyone: ThreadGroup) -> tuple[Tensor, int]:
        number, rank = divmod(everyone.rank, 2)
        pair = ThreadGroup(rank, 2, None, pairs[number])
        return replica(number, pair, [everyone] * 4)

    from support.thread_group import Meeting

    pairs = [Meeting(2), Meeting(2)]
    results = on_every_rank(4, work)
    for number, x in enumerate(tokens):
        (first, _), (second, _) = results[2 * number : 2 * number + 2]
        torch.testing.assert_close(first + second, whole(x), rtol=1e-4, atol=1e-3)
    # a row is the token and the numbers of its slots; no token goes to more than three other ranks
    assert sum(count for _, count in results) <= (7 + 4) * 3 * (HIDDEN + TOP_K) * 4


def test_each_rank_loads_its_own_experts_and_counts_the_parameters_of_all():
    spec = MoESpec(EXPERTS, TOP_K, SIZE)

    def work(group: ThreadGroup) -> tuple[list[int], int, int, set[str]]:
        found = []

        def make(builder: Builder) -> MoE:
            found.append(builder)
            return MoE(builder, spec, HIDDEN, NAMES)

        layer, tensors = build_layer(make, group=group, experts=ExpertRanks(group, True))
        assert isinstance(layer.dispatch, DealtExperts)
        assert not found[0].tensors_elsewhere & tensors.keys()
        return layer.dispatch.local, len(tensors), found[0].num_parameters, found[0].tensors_elsewhere | tensors.keys()

    (first, count, parameters, names), (second, _, others, _) = on_every_rank(2, work)
    assert (first, second) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert count == 1 + 4 * 3
    assert parameters == others == EXPERTS * HIDDEN + EXPERTS * 3 * HIDDEN * SIZE
    assert len(names) == 1 + EXPERTS * 3
