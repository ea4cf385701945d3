"""Mixtures of experts against a loop over tokens, for every way to choose and weigh experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quire.layers.build import Builder
from quire.layers.experts import GroupedExperts
from quire.layers.linear import DenseWeight
from quire.layers.lora import slots_of_copies
from quire.layers.moe import MoE
from quire.layers.specs import MLPSpec, MoESpec
from quire.ops import OPS, Kernels, Target
from quire.ops.cpu.build import library
from quire.parallel.mesh import Communicator
from support.layers import build_layer, draw, on_two_ranks

EXPERTS, TOP_K, HIDDEN, SIZE = 8, 3, 24, 20
X = draw("x", 7, HIDDEN)
NAMES = {
    "router": "router",
    "correction_bias": "correction_bias",
    **{f"expert_{key}": f"experts.{{e}}.{key}" for key in ("gate", "up", "down")},
    "experts_gate_up": "experts.gate_up",
    "experts_down": "experts.down",
    **{f"shared_{key}": f"shared.{key}" for key in ("gate", "up", "down")},
    "shared_expert_gate": "shared_gate",
}
SHARED = {"shared": MLPSpec(12)}
CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "scores as they are": {"normalize": False},
    "sigmoid": {"scoring": "sigmoid", "scale": 2.5},
    "a bias that only chooses": {"scoring": "sigmoid", "correction_bias": True},
    "the best groups by their best": {"groups": 4, "topk_groups": 2, "normalize": False},
    "the best groups by their two best": {"groups": 2, "topk_groups": 1, "group_score": "two_best"},
    "a shared expert": SHARED,
    "a gated shared expert": {**SHARED, "shared_gate": True},
    "all experts in one tensor": {"layout": "fused", "bias": True, "activation": "swiglu_oai"},
}


def expert(x: Tensor, e: int, spec: MoESpec, tensors: dict[str, Tensor]) -> Tensor:
    """x: [hidden]"""
    if spec.layout == "separate":
        gate, up = (tensors[f"experts.{e}.{key}.weight"] @ x for key in ("gate", "up"))
        return tensors[f"experts.{e}.down.weight"] @ (functional.silu(gate) * up)
    both = x @ tensors["experts.gate_up"][e] + tensors["experts.gate_up_bias"][e]
    (alpha, limit), gate, up = spec.swiglu, both[::2], both[1::2]
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    inner = (up + 1) * gate * torch.sigmoid(alpha * gate)
    return inner @ tensors["experts.down"][e] + tensors["experts.down_bias"][e]


def chosen(scores: list[float], spec: MoESpec) -> list[int]:
    """The experts with the best scores, of the groups with the best ones."""
    size = EXPERTS // spec.groups
    best = 1 if spec.group_score == "best" else 2

    def of_group(group: int) -> float:
        return sum(sorted(scores[group * size : (group + 1) * size])[-best:])

    groups = sorted(range(spec.groups), key=of_group)[-spec.topk_groups :]
    return sorted((e for e in range(EXPERTS) if e // size in groups), key=scores.__getitem__)[-TOP_K:]


def formula(x: Tensor, spec: MoESpec, tensors: dict[str, Tensor]) -> Tensor:
    """x: [hidden]"""
    logits = tensors["router.weight"] @ x + tensors.get("router.bias", 0)
    scores = logits.softmax(0) if spec.scoring == "softmax" else torch.sigmoid(logits)
    experts = chosen((scores + tensors.get("correction_bias", 0)).tolist(), spec)
    weights = scores[experts] / (scores[experts].sum() if spec.normalize else 1) * spec.scale
    out = sum(weight * expert(x, e, spec, tensors) for weight, e in zip(weights, experts, strict=True))
    assert isinstance(out, Tensor)
    if spec.shared is not None:
        gate, up = (tensors[f"shared.{key}.weight"] @ x for key in ("gate", "up"))
        shared = tensors["shared.down.weight"] @ (functional.silu(gate) * up)
        out = out + (torch.sigmoid(tensors["shared_gate.weight"] @ x) if spec.shared_gate else 1) * shared
    return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts(name, kernels):
    spec = MoESpec(EXPERTS, TOP_K, SIZE, **CASES[name])
    layer, tensors = build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES), kernels)
    wanted = torch.stack([formula(x, spec, tensors) for x in X])
    torch.testing.assert_close(layer(X), wanted, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(layer(X[:1]), wanted[:1], rtol=1e-4, atol=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_summands_of_what_one_does(name):
    spec = MoESpec(EXPERTS, TOP_K, SIZE, **CASES[name])
    whole, _ = build_layer(lambda builder: MoE(builder, spec, HIDDEN, NAMES))
    summands = on_two_ranks(lambda builder: MoE(builder, spec, HIDDEN, NAMES), X)
    torch.testing.assert_close(sum(summands), whole(X), rtol=1e-4, atol=1e-3)


def test_a_step_without_tokens_gives_none():
    layer, _ = build_layer(lambda builder: MoE(builder, MoESpec(EXPERTS, TOP_K, SIZE), HIDDEN, NAMES))
    assert layer(X[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("inputs", [32, 33])
def test_experts_in_panels_have_memory_of_their_own(inputs):
    """Also if panels need another number of inputs than the model has."""
    if library() is None:
        pytest.skip("the CPU kernels cannot be compiled here")
    kernels, offsets = Kernels(Target(torch.device("cpu"), torch.bfloat16)), torch.tensor([0, 2, 2, 5])
    experts = GroupedExperts(Builder(kernels, Communicator(), lambda name: DenseWeight), 3, 64, inputs, bias=False)
    weight, x = draw("experts", 3, 64, inputs).bfloat16(), draw("rows", 5, inputs).bfloat16()
    experts.weight.copy_(weight)
    experts.pack()
    made = experts(x, offsets)
    torch.testing.assert_close(made, OPS["grouped_linear"].reference(x, weight, None, offsets))
    for mine, given in zip(experts.tensors_of(0), experts.tensors_of(2), strict=True):
        mine.copy_(given)  # as the balancing of experts does
    assert torch.equal(experts(x, torch.tensor([0, 5, 5, 5]))[2:], made[2:])


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"top_k": 9}, "a token can use 1 to 8 of 8 experts, not 9"),
        ({"top_k": 0}, "a token can use 1 to 8 of 8 experts, not 0"),
        ({"groups": 4, "topk_groups": 1}, "a token can use 1 to 2 of 8 experts, not 3"),
        ({"groups": 3}, "8 experts cannot be in 3 groups"),
        ({"groups": 2, "topk_groups": 3}, "of which a token uses 3"),
        ({"groups": 8, "topk_groups": 8, "group_score": "two_best"}, "8 experts cannot be in 8 groups"),
    ],
)
def test_impossible_choices_are_refused(fields, problem):
    with pytest.raises(ValueError, match=problem):
        MoESpec(**{"num_experts": EXPERTS, "top_k": TOP_K, "intermediate_size": SIZE, **fields}).check()


def test_rows_of_no_expert_here_have_no_adapter():
    """On GPUs, such rows are computed, too, and come last. The slots of an adapter are followed by those of others."""
    slots, tokens, experts = torch.tensor([1, 1, -1]), torch.tensor([0, 0, 1, 2]), torch.tensor([0, 3, 2, 3])
    assert slots_of_copies(slots, 3, tokens, experts).tolist() == [3, -1, 5, -1]
