"""Norms against their formulas, alone and together with the sum before them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.norm import make_norm
from quire.layers.specs import NormSpec
from support.layers import build_layer, draw

X, RESIDUAL = 3 * draw("x", 6, 24) + 1, draw("residual", 6, 24)
SPECS: dict[str, dict[str, Any]] = {
    "rms": {"kind": "rms"},
    "wide rms with an offset": {"kind": "rms", "wide": True, "offset": 1.0},
    "layer": {"kind": "layer"},
    "layer with a bias": {"kind": "layer", "bias": True},
    "layer without a weight": {"kind": "layer", "affine": False, "bias": True},
}


def formula(x: Tensor, spec: NormSpec, tensors: dict[str, Tensor]) -> Tensor:
    x = x.double()
    if spec.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + spec.eps).sqrt()
    weight = tensors["norm.weight"] + spec.offset if "norm.weight" in tensors else 1.0
    return (x * weight + tensors.get("norm.bias", 0)).float()


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("name", SPECS)
def test_a_norm_and_a_norm_of_a_sum(name, kernels):
    spec = NormSpec(eps=0.1, **SPECS[name])
    norm, tensors = build_layer(lambda builder: make_norm(builder, "norm", 24, spec), kernels)
    assert ("norm.bias" in tensors) == (spec.bias and spec.affine)
    torch.testing.assert_close(norm(X), formula(X, spec, tensors))
    normed, residual = norm.add(X.clone(), RESIDUAL.clone())
    torch.testing.assert_close(residual, X + RESIDUAL)
    torch.testing.assert_close(normed, formula(X + RESIDUAL, spec, tensors))


@pytest.mark.parametrize("name", SPECS)
def test_the_first_sum_starts_the_residual_stream(name):
    spec = NormSpec(eps=0.1, **SPECS[name])
    norm, tensors = build_layer(lambda builder: make_norm(builder, "norm", 24, spec))
    normed, residual = norm.add(X.clone(), None)
    torch.testing.assert_close(residual, X)
    torch.testing.assert_close(normed, formula(X, spec, tensors))


def test_where_a_model_has_no_norm_nothing_changes():
    norm, tensors = build_layer(lambda builder: make_norm(builder, None, 24, NormSpec("rms", 1e-6)))
    assert not tensors
    assert torch.equal(norm(X), X)
    assert torch.equal(norm.add(X.clone(), RESIDUAL.clone())[0], X + RESIDUAL)
