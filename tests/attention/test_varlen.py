"""How steps of whole prompts go to another library's kernels: here to attention that knows nothing of pages, under
Triton's interpreter. Those of the libraries themselves need a GPU (benchmarks/gpu_checks.py)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

pytest.importorskip("triton")
import torch
from attention.test_attention import Kept, World, build, dense

import quire.attention.selection
from quire.attention.base import AttentionShape
from quire.attention.triton.attention_backend import TritonAttention
from quire.attention.triton.varlen_backend import FlashAttention, TorchVarlenAttention, VarlenAttention
from support.engines import GREEDY, generate, make_llm
from support.late_device import run_late

pytestmark = pytest.mark.usefixtures("interpreter")
FLOAT16, CPU = Kept(torch.float16), torch.device("cpu")
PROMPTS = [(0, 1), (0, 40), (0, 16), (0, 23)]  # (cached, new) tokens


class DenseVarlen(VarlenAttention):
    name = "dense"
    calls = 0

    @classmethod
    def missing(cls, shape):
        return None

    def varlen(self, q, k, v, layout, scale, window, soft_cap):
        self.calls += 1
        starts = layout.query_start_loc.tolist()
        spans = [slice(a, b) for a, b in pairwise(starts)]
        assert layout.longest_prompt == max(s.stop - s.start for s in spans)
        parts = [dense(q[s], k[s], v[s], scale, window, soft_cap or None, None) for s in spans]
        out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
        return out.to(q.dtype), lse.T.contiguous()


class PromptWorld(World):
    """One that says what its steps are, as a worker does."""

    def layout(self, requests):
        fresh = all(cached == 0 for cached, _ in requests)
        return replace(super().layout(requests), longest_prompt=max(n for _, n in requests) if fresh else 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", [{}, {"window": 9}], ids=str)
def test_prompts_go_to_the_library(how):
    world = PromptWorld(build(DenseVarlen, 4, 2, 32, 16, FLOAT16), PROMPTS)
    world.check(**how)
    assert world.backend.calls == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("requests", "how"),
    [([(0, 40), (16, 3)], {}), (PROMPTS, {"soft_cap": 3.0}), (PROMPTS, {"sinks": torch.linspace(-2, 3, 4)})],
    ids=["cached tokens", "soft cap", "sinks"],
)
def test_all_else_is_tritons(requests, how):
    world = PromptWorld(build(DenseVarlen, 4, 2, 32, 16, FLOAT16), requests)
    world.check(**how)
    assert not world.backend.calls


def test_another_layers_keys_are_not_taken():
    """A layer that stores nothing attends to what is in its cache."""
    backend = build(DenseVarlen, 4, 2, 32, 16, FLOAT16)
    first, then = PromptWorld(backend, PROMPTS), PromptWorld(backend, PROMPTS, seed=1)
    first.check()
    assert not backend.calls
    then.check()
    assert backend.calls == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", pytest.param("llama", marks=pytest.mark.nightly)])
def test_an_engine_says_the_same(checkpoints, references, monkeypatch, name):
    monkeypatch.setattr(quire.attention.selection, "BACKENDS", [DenseVarlen])
    monkeypatch.setattr(DenseVarlen, "unsupported", TritonAttention.unsupported)  # in float32
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 60}
    llm = make_llm(checkpoints.path(name), backend="dense", **options)
    backend = llm.core.executor.runner.forward.backends[0]
    run_late(llm)
    expected = references.continuations(name)[:4]
    params = GREEDY.clone(max_tokens=4)
    for continuation, output in zip(expected, generate(llm, [c.prompt for c in expected], params), strict=True):
        said = min(4, continuation.certain)
        assert output.outputs[0].token_ids[:said] == continuation.token_ids[:said]
    assert backend.calls


def test_what_the_libraries_cannot_do_is_said():
    shape = AttentionShape(4, 2, 64, 16, torch.bfloat16, CPU)
    assert "needs a GPU" in str(TorchVarlenAttention.unsupported(shape))
    assert "flash-attn is not installed" in str(FlashAttention.unsupported(shape))
    for other, why in (
        (replace(shape, cell=torch.int8), "cells"),
        (replace(shape, value_dim=32, num_kv_heads=1), "latent"),
        (replace(shape, head_dim=36), "36"),
        (replace(shape, dtype=torch.float32), "float32"),
    ):
        assert why in str(DenseVarlen.unsupported(other))
    assert DenseVarlen.unsupported(shape) is None
