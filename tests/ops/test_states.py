"""The ops of recurrent layers: kernels against their definition, and texts that are cut up in any way."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention.base import StepLayout
from quire.attention.states import StateBackend, matching_block_size
from quire.kv.specs import StateShape
from quire.ops import Kernels, Target
from quire.ops.cpu.build import library
from quire.ops.reference.states import Pages
from quire.ops.registry import OPS

CPU = torch.device("cpu")
SHAPES = {
    "mamba": StateShape(4, 2, 24, 16, 2 * 2 * 24 + 4 * 16, 4),
    "one group": StateShape(3, 1, 16, 70, 2 * 16 + 3 * 70, 3),
    "delta": StateShape(4, 2, 40, 24, 2 * 2 * 40 + 4 * 24, 4),
    "by channel": StateShape(2, 2, 20, 130, 2 * 2 * 20 + 2 * 130, 4, 20),
    "selective": StateShape(1, 1, 16, 150, 150, 4, 0, 150),
    "removal": StateShape(3, 3, 40, 70, 2 * 3 * 40 + 3 * 70, 2, 40, 80, 5),
}
BLOCK_SIZE = 8


def kernels(dtype: torch.dtype, reference: bool) -> Any:
    if not reference and library() is None:
        pytest.skip("the CPU kernels cannot be compiled here")
    return Kernels(Target(CPU, dtype), dict.fromkeys(OPS, "reference") if reference else {})


class Texts:
    """Inputs of whole texts, and a cache through which they are taken in steps."""

    def __init__(self, shape: StateShape, lengths: list[int], drafts: int, dtype: torch.dtype, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.shape, self.drafts, self.lengths = shape, drafts, lengths
        self.rule = "removal" if shape.scales == 2 * shape.key_dim else "plain" if shape.key_dim == 24 else "delta"
        self.backend = StateBackend(shape, BLOCK_SIZE, drafts)
        blocks = sum(-(-n // BLOCK_SIZE) for n in lengths)
        memory = torch.zeros(blocks + 1, self.backend.entry_bytes(), dtype=torch.uint8)
        self.pages = Pages.of(self.backend.view(memory, 0), shape, drafts)
        ids = torch.randperm(blocks, dtype=torch.int32) + 1
        self.table, at = torch.zeros(len(lengths), -(-max(lengths) // BLOCK_SIZE), dtype=torch.int32), 0
        for row, length in enumerate(lengths):
            count = -(-length // BLOCK_SIZE)
            self.table[row, :count], at = ids[at : at + count], at + count
        self.x = [torch.randn(n, shape.channels).to(dtype) for n in lengths]
        self.steps = [torch.randn(n, shape.heads * (shape.decays or shape.scales)).to(dtype) for n in lengths]
        self.scale = [torch.rand(n, shape.heads * shape.scales).to(dtype) for n in lengths]
        self.keys = [(torch.randn(n, 2 * shape.key_dim) / shape.key_dim**0.5).to(dtype) for n in lengths]
        self.weight, self.bias = torch.randn(shape.conv_width, shape.channels) / 2, torch.randn(shape.channels) / 4
        self.rate, self.skip = torch.randn(self.steps[0].shape[1]) - 1, torch.randn(shape.heads * shape.scales)
        self.rates = (torch.randn(shape.key_dim, shape.value_dim) - 1).exp()

    def step(self, kernels: Any, spans: list[tuple[int, int, int]]) -> list[Tensor]:
        """Compute tokens start ... end - 1 of some texts (text, start, end)."""
        starts = torch.tensor([0, *(end - start for _, start, end in spans)]).cumsum(0).int()
        lengths = torch.tensor([end for *_, end in spans], dtype=torch.int32)
        table = self.table[[text for text, *_ in spans]]
        plan = self.backend.plan(StepLayout(starts, lengths, torch.empty(0), table))
        x, steps, scale, keys = (
            torch.cat([inputs[text][start:end] for text, start, end in spans])
            for inputs in (self.x, self.steps, self.scale, self.keys)
        )
        z = self.shape
        made = kernels.causal_conv(x, self.weight, self.bias, self.pages, plan, self.rule != "removal")
        if z.decays == 0:
            lengths, _ = kernels.time_steps(steps, torch.zeros_like(self.rate), self.rate, 0.0, float("inf"))
            q, k = keys.split(z.key_dim, 1)
            out = kernels.selective_scan(q, k, made, lengths, self.rates, self.skip, self.pages, plan)
            return list(out.split(starts.diff().tolist()))
        sizes = [z.key_heads * z.key_dim, z.key_heads * z.key_dim, z.heads * z.value_dim]
        q, k, v = made.split(sizes, 1)
        q, k = (part.unflatten(1, (z.key_heads, z.key_dim)) / z.key_dim**0.5 for part in (q, k))
        _, decay = kernels.time_steps(steps, torch.zeros_like(self.rate), self.rate, 0.0, float("inf"))
        if self.rule == "removal":  # a part of what is found under a key of length 1
            read, part = scale.float().view(len(x), z.heads, 2, z.key_dim).unbind(2)
            read = torch.nn.functional.normalize(read - 0.5, dim=-1)
            scale = torch.stack([read, read * part], 2).flatten(1)
        out = kernels.scan(
            q,
            k,
            v.unflatten(1, (z.heads, z.value_dim)),
            decay,
            scale,
            self.skip if self.rule == "plain" else None,
            self.pages,
            plan,
            self.rule,
        )
        return list(out.split(starts.diff().tolist()))

    def whole(self, kernels: Any) -> list[Tensor]:
        return self.step(kernels, [(text, 0, length) for text, length in enumerate(self.lengths)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_compute_what_the_reference_does(name, dtype):
    made, expected = (
        Texts(SHAPES[name], [1, 7, 8, 30], 3, dtype).whole(kernels(dtype, reference)) for reference in (False, True)
    )
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)


def test_convolutions_over_more_tokens_than_registers_have_room_for():
    shape = StateShape(1, 1, 16, 16, 48, 19)
    made, expected = (
        Texts(shape, [30, 5], 0, torch.float32).whole(kernels(torch.float32, reference)) for reference in (False, True)
    )
    torch.testing.assert_close(made, expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("drafts", [0, 1, 3, 11])
@pytest.mark.parametrize("name", SHAPES)
def test_a_text_gives_the_same_bits_however_it_is_cut_and_whichever_drafts_are_rejected(name, drafts, reference):
    lengths, chosen = [40, 33, 8], kernels(torch.float32, reference)
    expected = Texts(SHAPES[name], lengths, drafts, torch.float32).whole(chosen)
    texts, dice = Texts(SHAPES[name], lengths, drafts, torch.float32), random.Random(f"{name} {drafts}")
    real, done = [x.clone() for x in texts.x], [0] * len(lengths)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        spans, rejected = [], []
        for text, length in enumerate(lengths):
            if done[text] == length or dice.random() < 0.2:
                continue
            end = min(length, done[text] + dice.choice([1, 1, 2, 5, 13]))
            wrong = dice.randint(0, min(drafts, end - done[text] - 1))
            texts.x[text] = real[text].clone()
            texts.x[text][end - wrong : end] += 1
            spans.append((text, done[text], end))
            rejected.append(wrong)
        for (text, start, end), wrong, out in zip(
            spans, rejected, texts.step(chosen, spans) if spans else [], strict=True
        ):
            right = end - wrong
            # torch rounds differently for other numbers of tokens; near 0, that is more than the default of allclose.
            near = partial(torch.allclose, atol=3e-6 if name in ("selective", "removal") else 1e-8)
            same = near if reference else torch.equal
            assert same(out[: right - start], expected[text][start:right])
            done[text] = right


@pytest.mark.parametrize("name", SHAPES)
def test_a_text_goes_on_from_any_checkpoint(name):
    chosen, shape = kernels(torch.float32, False), SHAPES[name]
    texts = Texts(shape, [40], 2, torch.float32)
    expected = texts.whole(chosen)[0]
    for border in range(BLOCK_SIZE, 40, BLOCK_SIZE):
        again = texts.step(chosen, [(0, border, border + 1)])[0]
        assert torch.equal(again, expected[border : border + 1])
        texts.whole(chosen)


def check_gated_norm(chosen, dtype, options, size, rtol):
    """chosen: the kernels that are compared with the reference. rtol: in bfloat16."""
    torch.manual_seed(0)
    x, gate = torch.randn(5, 48)[:, :24].to(dtype), torch.randn(5, 24).to(dtype)
    weight = None if size is None else torch.randn(24).to(dtype)
    made, expected = (
        each.gated_norm(x, gate, weight, 1e-5, size or 24, *options) for each in (chosen, kernels(dtype, True))
    )
    torch.testing.assert_close(made, expected, rtol=1e-5 if dtype == torch.float32 else rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [(True, "silu"), (False, "silu"), (False, "sigmoid")])
@pytest.mark.parametrize("size", [24, 12, None])
def test_gated_norms(dtype, options, size):
    check_gated_norm(kernels(dtype, False), dtype, options, size, 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounded_decays_equal_their_definition(dtype):
    x = (torch.randn(9, 40) * 4).to(dtype)[:, :37]
    bias, rate = torch.randn(37), torch.randn(37)
    made, expected = (kernels(dtype, plain).bounded_decays(x, bias, rate, -5.0) for plain in (False, True))
    torch.testing.assert_close(made, expected)


def test_time_steps_are_exact_where_they_are_short():
    x, bias, rate = (
        torch.linspace(-30, 30, 400)[:, None].repeat(1, 3),
        torch.tensor([0.0, 1, -1]),
        torch.tensor([0.0, 1, -3]),
    )
    steps, decay = kernels(torch.float32, False).time_steps(x, bias, rate, 0.0, float("inf"))
    wide = torch.nn.functional.softplus(x.double() + bias.double(), threshold=100)
    torch.testing.assert_close(steps, wide.float(), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(decay, torch.exp(-rate.double().exp() * wide).float(), rtol=2e-5, atol=1e-30)


def test_blocks_of_attention_are_as_large_as_a_state():
    assert matching_block_size(16, 1_000_000, 4096) == 256
    assert matching_block_size(16, 100, 4096) == 16
    assert matching_block_size(48, 1_000_000, 0) == 528
