"""Latent attention in its absorbed form against the paper's formulas, with keys and values made for every head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionShape, StepLayout
from quire.attention.reference import ReferenceAttention
from quire.layers.attention_spec import LatentAttentionSpec, LayerPlace
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState
from quire.layers.latent_attention import LatentAttention
from quire.layers.specs import NormSpec
from support.layers import build_layer, draw, on_two_ranks

HIDDEN, HEADS, TOKENS, BLOCK = 24, 4, 21, 8
X = draw("x", TOKENS, HIDDEN)
ANGLES = 3 * draw("angles", TOKENS, 4)
NAMES = {name: name for name in ("q", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "o")}


def make_spec(**fields: Any) -> LatentAttentionSpec:
    usual = {"q_rank": 10, "kv_rank": 16, "nope_dim": 6, "rope_dim": 8, "value_dim": 5}
    return LatentAttentionSpec(HIDDEN, HEADS, **{**usual, "norm": NormSpec("rms", 0.1), "scale": 0.3, **fields})


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight


def rotate(x: Tensor, interleaved: bool) -> Tensor:
    """x: [tokens, heads, 8]; as complex numbers."""
    pairs = x.unflatten(-1, (4, 2)) if interleaved else torch.stack(x.chunk(2, dim=-1), dim=-1)
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(()), ANGLES)[:, None]
    )
    return turned.flatten(-2) if interleaved else torch.cat(turned.unbind(-1), dim=-1)


def formula(spec: LatentAttentionSpec, tensors: dict[str, Tensor]) -> Tensor:
    def project(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)

    compressed = None if spec.q_rank is None else rms(project("q_a", X), tensors["q_a_norm.weight"])
    q = project("q", X) if compressed is None else project("q_b", compressed)
    q = q.view(TOKENS, HEADS, -1)
    latent, k_rope = project("kv_a", X).split([spec.kv_rank, spec.rope_dim], dim=-1)
    expanded = project("kv_b", rms(latent, tensors["kv_a_norm.weight"])).view(TOKENS, HEADS, -1)
    k_nope, v = expanded.split([spec.nope_dim, spec.value_dim], dim=-1)
    k_rope = rotate(k_rope[:, None], spec.interleaved_rotary).expand(-1, HEADS, -1)
    q = torch.cat([q[..., : spec.nope_dim], rotate(q[..., spec.nope_dim :], spec.interleaved_rotary)], dim=-1)
    scores = torch.einsum("qhd,khd->hqk", q, torch.cat([k_nope, k_rope], dim=-1)) * spec.scale
    future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return project("o", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))


def make(builder: Builder, spec: LatentAttentionSpec):
    """The layer over a cache of its own, as a function of the hidden states of a prompt, and of the wanted rows."""
    layer = LatentAttention(builder, spec, NAMES, LayerPlace(kv_group=0))
    c = spec.cache_shape(builder.tensor_group)
    shape = AttentionShape(
        c.num_heads, c.num_kv_heads, c.head_dim, BLOCK, torch.float32, torch.device("cpu"), c.value_dim
    )
    backend = ReferenceAttention(shape)
    layer.bind(backend, backend.view(torch.zeros(5, backend.entry_bytes(), dtype=torch.uint8), 0))
    blocks = torch.tensor([[3, 1, 4]], dtype=torch.int32)

    def run(x: Tensor, start: int = 0, rows: Tensor | None = None) -> Tensor:
        positions = torch.arange(start, start + len(x))
        slots = blocks[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
        starts, lengths = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, len(x)], [start + len(x)]))
        plan = backend.plan(StepLayout(starts, lengths, slots, blocks))
        angles = ANGLES[start : start + len(x)]
        return layer(x, ForwardState(positions, [(angles.cos(), angles.sin())], [plan]), rows)

    return run


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("fields", [{}, {"q_rank": None}, {"bias": True}, {"interleaved_rotary": False}], ids=str)
def test_absorbed_attention_equals_attention_over_expanded_keys_and_values(fields, kernels):
    spec = make_spec(**fields)
    run, tensors = build_layer(lambda builder: make(builder, spec), kernels)
    wanted = formula(spec, tensors)
    torch.testing.assert_close(run(X), wanted, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(run(X[13:], 13), wanted[13:], rtol=1e-4, atol=1e-3)  # the first 13 are cached
    rows = torch.tensor([20, 4])
    torch.testing.assert_close(run(X, 0, rows), wanted[rows], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("fields", [{}, {"q_rank": None}], ids=str)
def test_two_ranks_with_half_of_the_heads_each_compute_summands_of_what_one_does(fields):
    spec = make_spec(**fields)
    whole, _ = build_layer(lambda builder: make(builder, spec))
    summands = on_two_ranks(lambda builder: make(builder, spec), X)
    torch.testing.assert_close(sum(summands), whole(X), rtol=1e-4, atol=1e-3)
