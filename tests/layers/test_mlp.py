"""Feed-forward layers against their formula, with torch's own activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quire.layers.mlp import MLP
from quire.layers.specs import MLPSpec
from support.layers import build_layer, draw, on_two_ranks

X = draw("x", 5, 24)
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_python": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x) ** 2,
}


def formula(x: Tensor, spec: MLPSpec, tensors: dict[str, Tensor]) -> Tensor:
    def project(name: str, x: Tensor) -> Tensor:
        weight = tensors[f"{name}.weight"]
        return x @ (weight if spec.transposed else weight.T) + tensors.get(f"{name}.bias", 0)

    up, activation = project("up_proj", x), ACTIVATIONS[spec.activation]
    return project("down_proj", activation(project("gate_proj", x)) * up if spec.gated else activation(up))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, gated, kernels):
    spec = MLPSpec(40, activation, gated)
    layer, tensors = build_layer(lambda builder: MLP(builder, spec, 24, NAMES), kernels)
    torch.testing.assert_close(layer(X), formula(X, spec, tensors), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("fields", [{"bias": True}, {"transposed": True, "gated": False, "bias": True}], ids=str)
def test_biases_and_transposed_weights(fields: dict[str, Any]):
    spec = MLPSpec(40, **fields)
    layer, tensors = build_layer(lambda builder: MLP(builder, spec, 24, NAMES))
    torch.testing.assert_close(layer(X), formula(X, spec, tensors), rtol=1e-5, atol=1e-4)


def test_gate_and_up_in_one_tensor():
    names = {"gate_up": "gate_up_proj", "down": "down_proj"}
    layer, tensors = build_layer(lambda builder: MLP(builder, MLPSpec(40), 24, names))
    gate, up = tensors["gate_up_proj.weight"].chunk(2)
    parts = {"gate_proj.weight": gate, "up_proj.weight": up, **tensors}
    torch.testing.assert_close(layer(X), formula(X, MLPSpec(40), parts), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("names", [NAMES, {"gate_up": "gate_up_proj", "down": "down_proj"}], ids=["apart", "fused"])
def test_two_ranks_compute_summands_of_what_one_does(names):
    spec = MLPSpec(40, bias=True)
    whole, _ = build_layer(lambda builder: MLP(builder, spec, 24, names))
    summands = on_two_ranks(lambda builder: MLP(builder, spec, 24, names), X)
    torch.testing.assert_close(sum(summands), whole(X), rtol=1e-5, atol=1e-4)


def test_an_unknown_activation_is_named():
    with pytest.raises(ValueError, match=r"activation 'sine' is not supported; supported: gelu, "):
        build_layer(lambda builder: MLP(builder, MLPSpec(40, "sine"), 24, NAMES))
