"""Norm, rotation and storing in one pass, against the three one after the other: to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention.test_attention import BFLOAT16, CELLS, FLOAT32, NARROW, OF_FLOAT16, World, blocks_of, build
from torch import Tensor

from quire.attention.base import Preparation
from quire.attention.cpu import CpuAttention
from quire.ops import Kernels
from quire.ops.registry import Target


def both_ways(world: World, kernels: Kernels, norm: str | None, rotary: str | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries, keys and cache, each as made in one pass and as made by the operations one after the other."""
    shape, backend = world.backend.shape, world.backend
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    parts = [heads, kv_heads, kv_heads]
    draw = torch.Generator().manual_seed(1)
    tokens = sum(new for _, new in world.requests)
    qkv = torch.randn(tokens, sum(parts), dim, generator=draw).to(shape.dtype)
    weights = [torch.rand(dim, generator=draw) + 0.5 for _ in "qk"] if norm else [None, None]
    if norm == "model's type":
        weights = [weight.to(shape.dtype) for weight in weights]
    angles = torch.rand(tokens, 16 if rotary == "part" else dim // 2, generator=draw) * 6
    cos, sin = (angles.cos(), angles.sin()) if rotary else (None, None)
    plan = backend.plan(world.layout(world.requests))

    memories = [blocks_of(backend, world.cache).flatten(1).clone() for _ in range(2)]
    wanted_cache, made_cache = (backend.view(memory, 1) for memory in memories)
    q, k, v = qkv.clone().split(parts, dim=1)
    if norm:
        q, k = kernels.rms_norm(q, weights[0], 1e-6), kernels.rms_norm(k, weights[1], 1e-6)
    if rotary:
        q, k = kernels.rotary_embedding(q, k, cos, sin, rotary == "pairs")
    backend.store(wanted_cache, k, v, plan)

    made_q, made_k, made_v = qkv.clone().split(parts, dim=1)
    backend.prepare(made_cache, made_q, made_k, made_v, plan, Preparation(*weights, 1e-6, cos, sin, rotary == "pairs"))
    yield from ((made_q, q), (made_k, k), (made_cache, wanted_cache))


@pytest.mark.sampled(27)
@pytest.mark.parametrize("kept", [FLOAT32, BFLOAT16, NARROW, *CELLS, *OF_FLOAT16], ids=str)
@pytest.mark.parametrize("requests", [[(0, 1)], [(3, 70), (0, 16), (40, 1)], [(9, 1)] * 20], ids=str)
@pytest.mark.parametrize("rotary", ["halves", "pairs", "part", None])
@pytest.mark.parametrize("norm", ["model's type", "float32", None])
@pytest.mark.parametrize("dim", [48, 64, 128])
def test_preparing_in_one_pass_is_norm_rotation_and_storing(kept, requests, rotary, norm, dim):
    world = World(build(CpuAttention, 6, 2, dim, 32, kept), requests)
    for made, wanted in both_ways(world, Kernels(Target(torch.device("cpu"), kept.dtype)), norm, rotary):
        assert torch.equal(made.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
