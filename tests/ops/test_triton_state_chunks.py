"""The GPU's scan in chunks against its definition, in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.triton_kernels import INSTALLED, interpreter  # noqa: F401

if not INSTALLED:
    pytest.skip("Triton is not installed", allow_module_level=True)

import test_states
from test_states import Texts, kernels

from quire.kv.specs import StateShape
from quire.ops.registry import OPS, Target
from quire.ops.triton import convolution, state_chunks, states

pytestmark = pytest.mark.usefixtures("interpreter")
KERNELS = SimpleNamespace(
    causal_conv=convolution.causal_conv, time_steps=convolution.time_steps, scan=state_chunks.scan
)
SHAPES = {  # two heads for each key head where a head has one decay, and values for two programs
    "plain": StateShape(2, 1, 24, 40, 2 * 24 + 2 * 40, 2),
    "delta": StateShape(2, 1, 40, 24, 2 * 40 + 2 * 24, 2),
    "by channel": StateShape(1, 1, 20, 40, 2 * 20 + 40, 2, 20),
    "removal": StateShape(1, 1, 20, 24, 2 * 20 + 24, 2, 20, 40, 5),
}
CLOSE = {torch.float32: {"rtol": 1e-4, "atol": 1e-5}, torch.bfloat16: {"rtol": 3e-2, "atol": 1e-2}}


@pytest.fixture
def block_size(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    monkeypatch.setattr(test_states, "BLOCK_SIZE", request.param)
    return request.param


def check(made: Texts, expected: Texts, dtype: torch.dtype) -> None:
    """Compare what two ways to compute the same steps have left in the pages."""
    assert torch.equal(made.pages.number, expected.pages.number)
    torch.testing.assert_close(made.pages.state, expected.pages.state, **CLOSE[dtype])
    torch.testing.assert_close(made.pages.behind, expected.pages.behind, **CLOSE[dtype])


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("block_size", [48], indirect=True)  # the last chunk of a block is shorter
@pytest.mark.parametrize("name", SHAPES)
def test_long_and_short_texts_in_steps_with_rejected_drafts(name, block_size, dtype):
    """A chunk and a token, a step that begins behind uncertain tokens within a chunk, and single tokens beside it."""
    lengths, drafts = [52, 20], 2
    expected, made = (Texts(SHAPES[name], lengths, drafts, dtype) for _ in range(2))
    chosen, real = kernels(dtype, reference=True), expected.x[0].clone()
    for spans, wrong in (([(0, 0, 35), (1, 0, 19)], 1), ([(0, 34, 52), (1, 19, 20)], 0)):
        results = []
        for texts, each in ((expected, chosen), (made, KERNELS)):
            end = spans[0][2]
            texts.x[0] = real.clone()
            texts.x[0][end - wrong : end] += 1
            results.append(texts.step(each, spans))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(theirs, ours, **CLOSE[dtype])
        check(made, expected, dtype)


class Decaying:
    """Kernels that let texts of 40 tokens decay by given factors, which change within a chunk."""

    def __init__(self, chosen: Any) -> None:
        self.chosen = chosen

    def __getattr__(self, name: str) -> Any:
        return getattr(self.chosen, name)

    def time_steps(self, x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        decay = torch.stack([torch.ones(40), torch.full((40,), 2.0612e-9), torch.full((40,), 0.9)])
        decay[0, 10], decay[0, 35], decay[2, 3:30:9] = 0.0, 0.0, 0.0
        decay[1, 5:30:7], decay[1, 33:] = 0.99, 1.0
        return x, decay.view(-1, 1).repeat(1, x.shape[1])


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("block_size", [64], indirect=True)
@pytest.mark.parametrize(
    "name",
    ["plain", "removal", *(pytest.param(name, marks=pytest.mark.sampled(4)) for name in ("delta", "by channel"))],
)
def test_decays_of_one_and_zero_and_strong_ones(name, block_size):
    """Decays of 1 with some of 0, of exp(-20) with some near 1, and of 0.9 with some of 0."""
    expected, made = (Texts(SHAPES[name], [40] * 3, 0, torch.float32) for _ in range(2))
    theirs = expected.whole(Decaying(kernels(torch.float32, reference=True)))
    torch.testing.assert_close(made.whole(Decaying(KERNELS)), theirs, rtol=1e-4, atol=2e-5)
    check(made, expected, torch.float32)


@pytest.mark.parametrize("block_size", [8], indirect=True)
def test_blocks_that_are_smaller_than_a_chunk(block_size):
    expected, made = (Texts(SHAPES["delta"], [1, 19], 3, torch.float32) for _ in range(2))
    theirs = expected.whole(kernels(torch.float32, reference=True))
    torch.testing.assert_close(made.whole(KERNELS), theirs, rtol=1e-4, atol=1e-5)
    check(made, expected, torch.float32)


@pytest.mark.parametrize("block_size", [32], indirect=True)
def test_equal_keys_that_a_state_knows_already(block_size):
    """With a key of length 1 that is always the same, each value takes the place of the one before."""
    shape = StateShape(1, 1, 40, 24, 2 * 40 + 24, 2)
    expected, made = (Texts(shape, [64], 0, torch.float32) for _ in range(2))
    q, v = torch.randn(64, 1, 40), torch.randn(64, 1, 24)
    k = torch.nn.functional.normalize(torch.randn(40), dim=0).expand(64, 1, 40).contiguous()
    given = q, k, v, torch.ones(64, 1), torch.ones(64, 1), None
    results = [
        scan(*given, texts.pages, plan_of(texts, 64), "delta")
        for texts, scan in ((made, state_chunks.scan), (expected, OPS["scan"].reference))
    ]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[0], (q * k).sum(-1, keepdim=True) * v, rtol=1e-4, atol=1e-5)


def plan_of(texts: Texts, length: int, requests: int = 1) -> Any:
    from quire.attention.base import StepLayout

    starts = torch.arange(requests + 1, dtype=torch.int32) * length
    lengths = torch.full((requests,), length, dtype=torch.int32)
    return texts.backend.plan(StepLayout(starts, lengths, torch.empty(0), texts.table, tokens_per_request=length))


def test_steps_of_short_spans_launch_no_kernels_of_chunks(monkeypatch):
    """Decoding and drafts need no additional launches."""
    shape = StateShape(1, 1, 16, 16, 48, 4)
    texts = Texts(shape, [4] * 9, 0, torch.float32)
    monkeypatch.setattr(state_chunks, "_prepare", None)
    monkeypatch.setattr(state_chunks, "_scan_chunks", None)
    q, k, v = (torch.randn(36, 1, 16) for _ in range(3))
    state_chunks.scan(q, k, v, torch.ones(36, 1), torch.ones(36, 1), None, texts.pages, plan_of(texts, 4, 9), "plain")


def test_batch_invariant_engines_take_tokens_one_after_the_other():
    gpu = torch.device("cuda", 0)
    assert OPS["scan"].choose(Target(gpu, torch.bfloat16)).function is state_chunks.scan
    assert OPS["scan"].choose(Target(gpu, torch.bfloat16, batch_invariant=True)).function is states.scan
