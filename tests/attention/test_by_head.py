"""Attention with lengths by head, on every backend, against softmax over the keys that each head has."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape, StepLayout
from quire.attention.by_head import HeadLayout, by_head
from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention

HEADS, KV_HEADS, DIM, BLOCK, LAYERS, BLOCKS = 4, 2, 24, 16, 2, 4
SLICES = LAYERS * KV_HEADS  # of a block


def triton() -> type[AttentionBackend]:
    from quire.attention.triton.attention_backend import TritonAttention

    return TritonAttention


@pytest.fixture(params=["reference", "cpu", "cpu bfloat16", "triton"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    kind = {"reference": ReferenceAttention, "triton": triton}.get(request.param, CpuAttention)
    kind = kind() if kind is triton else kind
    dtype = torch.bfloat16 if "bfloat16" in request.param else torch.float32
    shape = AttentionShape(HEADS, KV_HEADS, DIM, BLOCK, dtype, torch.device("cpu"))
    if reason := kind.unsupported(shape):
        pytest.skip(reason)
    return kind(shape)


def filled(backend: AttentionBackend) -> tuple[Tensor, Tensor, Tensor]:
    """Memory, and the keys and values that have been stored in it, [layers, kv_heads, slots, dim]."""
    memory = torch.zeros(BLOCKS, LAYERS * backend.entry_bytes(), dtype=torch.uint8)
    k, v = torch.randn(2, LAYERS, KV_HEADS, BLOCKS * BLOCK, DIM).to(backend.shape.dtype)
    slots = torch.arange(BLOCKS * BLOCK)
    bounds = torch.tensor([0, len(slots)], dtype=torch.int32)
    plan = backend.plan(StepLayout(bounds, bounds[1:], slots, torch.arange(BLOCKS, dtype=torch.int32)[None]))
    for layer in range(LAYERS):
        backend.store(backend.view(memory, layer), k[layer].transpose(0, 1), v[layer].transpose(0, 1), plan)
    return memory, k, v


@pytest.mark.sampled(2)
def test_reading_blocks_is_the_inverse_of_storing(backend: AttentionBackend):
    memory, k, v = filled(backend)
    blocks = torch.tensor([2, 0, 3])
    slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    for layer in range(LAYERS):
        for plane, stored in enumerate((k, v)):
            read = backend.read(backend.view(memory, layer), blocks, plane)
            assert torch.equal(read, stored[layer][:, slots].transpose(0, 1))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 1, 2)], ids=["decoding", "mixed"])
def test_each_head_sees_the_keys_of_its_own_slices(backend: AttentionBackend, counts: tuple[int, ...]):
    draw = random.Random(4)
    memory, k, v = filled(backend)
    wrapped = by_head(backend)
    caches = [wrapped.view(memory, layer) for layer in range(LAYERS)]
    lengths = torch.tensor([[draw.randint(6, 40) for _ in range(KV_HEADS * 3)] for _ in range(LAYERS)]).int()
    tables = torch.tensor([[draw.sample(range(BLOCKS * SLICES), 3) for _ in range(KV_HEADS * 3)] for _ in caches]).int()
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    tokens, group = sum(counts), HEADS // KV_HEADS
    per_request = counts[0] if len(set(counts)) == 1 else 0
    layout = StepLayout(
        starts,
        torch.full((3,), 40).int(),
        torch.full((tokens,), -1),
        torch.zeros(3, 3).int(),
        tokens_per_request=per_request,
        by_head=HeadLayout([], tables, lengths),
    )
    plan = wrapped.plan(layout)
    q = torch.randn(tokens, HEADS, DIM).to(backend.shape.dtype)
    slices_k, slices_v = (x.view(LAYERS, KV_HEADS, BLOCKS, BLOCK, DIM).float() for x in (k, v))
    for layer, cache in enumerate(caches):
        out, lse = wrapped.attend(q, cache, plan, scale=0.3)
        for head in range(HEADS):
            for request, count in enumerate(counts):
                place = head // group * 3 + request
                table, length = tables[layer, place].tolist(), int(lengths[layer, place])
                of_slices = [(s // SLICES, s % SLICES // KV_HEADS, s % KV_HEADS) for s in table]
                keys = torch.cat([slices_k[layer_of, h, b] for b, layer_of, h in of_slices])[:length]
                values = torch.cat([slices_v[layer_of, h, b] for b, layer_of, h in of_slices])[:length]
                for token in range(count):
                    seen = length - count + token + 1
                    scores = keys[:seen] @ q[starts[request] + token, head].float() * 0.3
                    expected = scores.softmax(0) @ values[:seen]
                    near = 2e-2 if backend.shape.dtype is torch.bfloat16 else 1e-5
                    torch.testing.assert_close(
                        out[starts[request] + token, head].float(), expected, atol=near, rtol=near
                    )
                    assert abs(lse[starts[request] + token, head] - scores.logsumexp(0)) < near


def test_a_step_of_plain_requests_is_computed_by_the_other_backend(backend: AttentionBackend):
    wrapped, bounds = by_head(backend), torch.tensor([0, 1], dtype=torch.int32)
    layout = StepLayout(bounds, bounds[1:], torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1).int())
    assert not wrapped.plan(layout).heads
    assert not wrapped.plan(replace(layout, by_head=HeadLayout([]))).heads
