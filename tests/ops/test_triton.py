"""Every operation in Triton, on a GPU or under Triton's interpreter, against its reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from quire.ops.reference import drafts as draft_ops
from quire.ops.reference import elementwise, sampling
from quire.ops.reference.masks import apply_token_masks
from quire.ops.reference.quantized import QuantizedMatrix, grouped_quantized_linear, quantize, quantized_linear
from quire.ops.triton import elementwise as ours
from quire.ops.triton.drafts import accept_or_resample, count_kept
from quire.ops.triton.linear import grouped_linear_triton, grouped_quantized_linear_triton, quantized_linear_triton
from quire.ops.triton.masks import apply_token_masks_triton
from quire.ops.triton.sampling import argmax, keep_top_k_top_p, sample_gumbel
from quire.ops.triton.sums import log_softmax_triton, row_sums_triton
from quire.ops.triton.targets import INTERPRETED

pytestmark = pytest.mark.usefixtures("interpreter")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF = pytest.param(torch.float16, marks=pytest.mark.sampled(4))
DTYPES = [torch.float32, HALF, torch.bfloat16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def draw(dtype: torch.dtype, *size: int) -> Tensor:
    return (torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))) * 2).to(DEVICE, dtype)


def close(made: Tensor, wanted: Tensor) -> None:
    assert (made.dtype, made.shape) == (wanted.dtype, wanted.shape)
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[made.dtype]
    torch.testing.assert_close(made, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.sampled(4)
@each_dtype
@pytest.mark.parametrize("dim", [1, 17, 48, 130])
def test_norms(dtype, dim):
    wide = draw(dtype, 3, 3 * dim)
    for weight in (draw(dtype, dim), draw(torch.float32, dim)):
        for x in (
            draw(dtype, 3, dim),
            wide[:, dim : 2 * dim],
            wide.unflatten(1, (3, dim))[:, 1:],
            draw(dtype, dim, 3).t(),
        ):
            close(ours.rms_norm(x, weight, 1e-6), elementwise.rms_norm.reference(x, weight, 1e-6))
        x, residual = wide[:, :dim].clone(), draw(dtype, 3, 2 * dim)[:, dim:]
        wanted = elementwise.add_rms_norm.reference(x.clone(), residual.clone(), weight, 1e-6)
        for a, b in zip(ours.add_rms_norm(x, residual, weight, 1e-6), wanted, strict=True):
            close(a, b)
    assert ours.rms_norm(draw(dtype, 0, dim), weight, 1e-6).shape == (0, dim)


@each_dtype
@pytest.mark.parametrize("half", [1, 33, 128])
def test_gated_activations(dtype, half):
    for x in (draw(dtype, 3, 2 * half) * 4, draw(dtype, 3, 3 * half)[:, half:], draw(dtype, 0, 2 * half)):
        close(ours.silu_and_mul(x), elementwise.silu_and_mul.reference(x))
        close(ours.swiglu_oai(x, 0.5, 3.0), elementwise.swiglu_oai.reference(x, 0.5, 3.0))
        for after in (False, True):
            close(ours.limited_swiglu(x, 1.5, after), elementwise.limited_swiglu.reference(x, 1.5, after))
        for approximate in ("none", "tanh"):
            close(ours.gelu_and_mul(x, approximate), elementwise.gelu_and_mul.reference(x, approximate))


@pytest.mark.sampled(3)
@each_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (6, 6)])
def test_rotary_embedding(dtype, interleaved, head_dim, rotary_dim):
    fused = draw(dtype, 3, 6 * head_dim)
    q, k = (x.unflatten(1, (-1, head_dim)) for x in (fused[:, : 4 * head_dim], fused[:, 4 * head_dim :]))
    angle = draw(torch.float32, 3, rotary_dim // 2) * 5
    wanted = elementwise.rotary_embedding.reference(q.clone(), k.clone(), angle.cos(), angle.sin(), interleaved)
    for a, b in zip(ours.rotary_embedding(q, k, angle.cos(), angle.sin(), interleaved), wanted, strict=True):
        close(a, b)


@pytest.mark.sampled(4)
@each_dtype
@pytest.mark.parametrize("counts", [(1, 0, 2), (0, 0), (0, 5, 0), (13, 1, 20)], ids=str)
def test_products_of_experts(dtype, counts):
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
    for inner, outer in ((64, 96), (33, 7)):
        x, weight = draw(dtype, sum(counts), inner) / 4, draw(dtype, len(counts), outer, inner) / inner**0.5
        for bias in (None, draw(dtype, len(counts), outer)):
            wanted = elementwise.grouped_linear.reference(x, weight, bias, offsets)
            close(grouped_linear_triton(x, weight, bias, offsets), wanted)


def matrices() -> Iterator[QuantizedMatrix]:
    for outs, ins, group in ((70, 64, 32), (24, 70, 32), (40, 33, 33)):
        weight = draw(torch.float32, outs, ins)
        for bits in (8, 4):
            matrix = quantize.reference(weight, bits, group)
            yield matrix
            offsets = draw(torch.float32, *matrix.scales.shape)
            yield QuantizedMatrix(
                matrix.codes, matrix.scales, group, ins, offsets, order=torch.randperm(ins, device=DEVICE)
            )
            factors = torch.rand(outs, 1, 1, device=DEVICE).half()
            yield QuantizedMatrix(matrix.codes, matrix.scales, group, ins, factors=factors)
        yield QuantizedMatrix(weight.to(torch.float8_e4m3fn), matrix.scales, group, ins)


def test_products_with_quantized_weights():
    torch.manual_seed(0)
    for matrix in matrices():
        for rows in (0, 1) if matrix.factors is None else (20,):
            x = draw(torch.float32, rows, matrix.in_features) / 8
            bias = draw(torch.float32, matrix.out_features) if rows == 1 else None
            made = quantized_linear_triton(x, quantized_linear_triton.pack(matrix), bias)
            torch.testing.assert_close(made, quantized_linear.reference(x, matrix, bias), rtol=2**-6, atol=1e-3)


def test_products_of_eight_bits_are_those_of_rounded_inputs():
    """In 16 bits, inputs are rounded to 8, each row with a scale of its own."""
    torch.manual_seed(0)
    for outs, ins, group in ((70, 256, 128), (33, 200, 200), (40, 192, 64), (24, 64, 64)):
        matrix = quantize.reference(draw(torch.float32, outs, ins), 8, group)
        for rows in (1, 20) if outs < 70 else (70,):
            x = draw(torch.float16, rows, ins)
            scale = x.float().abs().amax(1, keepdim=True) / 127
            rounded = (x.float() / scale).round() * scale
            made = quantized_linear_triton(x, quantized_linear_triton.pack(matrix), None)
            wanted = quantized_linear.reference(rounded, matrix, None)
            torch.testing.assert_close(made.float(), wanted, rtol=2**-9, atol=2**-6)
            plain = quantized_linear.reference(x.float(), matrix, None)
            assert (made.float() - plain).norm() / plain.norm() < 0.01


@pytest.mark.sampled(3)
@pytest.mark.parametrize("counts", [(1, 0, 20), (0, 0), (3, 17)], ids=str)
def test_products_of_experts_with_quantized_weights(counts):
    torch.manual_seed(0)
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
    for bits, group in ((8, 64), (4, 32)):
        matrix = quantize.reference(draw(torch.float32, len(counts) * 24, 64), bits, group)
        x = draw(torch.float32, sum(counts), 64) / 8
        for bias in (None, draw(torch.float32, len(counts), 24)):
            made = grouped_quantized_linear_triton(x, quantized_linear_triton.pack(matrix), bias, offsets)
            wanted = grouped_quantized_linear.reference(x, matrix, bias, offsets)
            torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)


@each_dtype
def test_sums_of_rows(dtype):
    for rows, dim in ((0, 5), (1, 1), (3, 17), (2, 5000)):
        for x in (draw(dtype, rows, dim), draw(dtype, rows, dim + 8)[:, 8:], draw(dtype, dim, rows).t()):
            torch.testing.assert_close(row_sums_triton(x), elementwise.row_sums.reference(x), rtol=1e-5, atol=1e-3)
            close(log_softmax_triton(x), sampling.log_softmax.reference(x))
    masked = torch.tensor([[-torch.inf, 1.0, -torch.inf, 2.0]], device=DEVICE)
    close(log_softmax_triton(masked), sampling.log_softmax.reference(masked))


@each_dtype
def test_masks_forbid_tokens(dtype):
    """In words of one and of several programs; a mask forbids all tokens, allows all, or some."""
    torch.manual_seed(0)
    for vocab in (1, 33, 4096, 4100):
        logits, places = draw(dtype, 4, vocab), torch.tensor([3, 0, 1], device=DEVICE)
        bits = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), device=DEVICE).int()
        bits[1, ::2], bits[1, 1::2] = 0, -1
        for x in (logits, draw(dtype, 4, vocab + 8)[:, 8:], logits.t().contiguous().t()):
            wanted = apply_token_masks.reference(x.clone(), places, bits)
            assert torch.equal(apply_token_masks_triton(x.clone(), places, bits), wanted)
    assert torch.equal(apply_token_masks_triton(logits.clone(), places[:0], bits[:0]), logits)


def kept_cases() -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    torch.manual_seed(0)
    for rows, vocab, scale in ((0, 10, 1), (1, 1, 1), (3, 17, 1), (3, 1000, 3), (2, 1025, 0.01), (1, 5000, 40)):
        logits = torch.randn(rows, vocab, device=DEVICE) * scale
        k = torch.tensor([1, 2, 5, 50, 1000, vocab, vocab + 9])[torch.randint(0, 7, (rows,))].to(DEVICE)
        p = torch.tensor([1.0, 0.95, 0.5, 0.1, 1e-6])[torch.randint(0, 5, (rows,))].to(DEVICE)
        masked = logits.masked_fill(torch.rand(rows, vocab, device=DEVICE) < 0.9, -torch.inf)
        if vocab < 1000:
            yield logits.clone(), k, None
            yield masked, None, p
            yield logits, k, p
        else:
            yield masked if rows == 3 else logits, k, p
    tied = torch.randint(0, 4, (4, 300), device=DEVICE).float()
    yield tied.clone(), torch.arange(1, 5, device=DEVICE) * 60, None
    yield tied * 100, None, torch.linspace(0.05, 0.8971, 4, device=DEVICE)
    yield tied.clone(), torch.arange(1, 5, device=DEVICE) * 60, torch.linspace(0.05, 0.8971, 4, device=DEVICE)
    yield draw(torch.float32, 300, 2).t(), torch.full((2,), 7, device=DEVICE), None


@pytest.mark.slow
def test_top_k_and_top_p_keep_what_the_reference_keeps():
    for logits, k, p in kept_cases():
        wanted = sampling.keep_top_k_top_p.reference(logits.clone(), k, p)
        assert torch.equal(keep_top_k_top_p(logits.clone(), k, p), wanted)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("vocab", "spread", "used", "dtype"),
    [
        (1, 1.0, (1, 1, 1), torch.float32),
        (130, 3.0, (0, 1, 0), torch.bfloat16),
        pytest.param(9000, 4.0, (1, 1, 1), torch.float32, marks=pytest.mark.sampled(4)),
        (4100, 3.0, (1, 0, 1), torch.bfloat16),
        pytest.param(4500, 0.01, (0, 0, 1), torch.float32, marks=pytest.mark.sampled(4)),
        (1500, 0.01, (1, 1, 1), torch.float32),
    ],
)
def test_draws_from_truncated_logits_are_those_of_the_reference(vocab, spread, used, dtype):
    """In rows of several parts, with few candidates or many, and rows without truncation beside others."""
    torch.manual_seed(1)
    seeds, positions = torch.arange(6, device=DEVICE) - 3, torch.arange(6, device=DEVICE) * 7
    temperature = torch.tensor([1.0, 0.5, 1.3, 0.01, 2.0, 1.0], device=DEVICE)
    min_p = torch.tensor([0.0, 0.0, 0.05, 0.9, 0.0, 0.0], device=DEVICE)
    top_k = torch.tensor([50, 3, vocab, 1000, 1, vocab + 5], device=DEVICE)
    top_p = torch.tensor([0.9, 1.0, 0.7, 0.5, 1.0, 1.0], device=DEVICE)
    logits = torch.randn(6, vocab, device=DEVICE) * spread
    logits[1] = logits[1].masked_fill(torch.rand(vocab, device=DEVICE) < 0.9, -torch.inf)
    logits[1, -1] = 0.0
    logits[2] = logits[2].round()  # many equal logits
    limits = (limit if uses else None for limit, uses in zip((min_p, top_k, top_p), used, strict=True))
    arguments = logits.to(dtype), seeds, positions, temperature, *limits
    assert torch.equal(sample_gumbel(*arguments), sampling.sample_gumbel.reference(*arguments))


def test_the_largest_logit_is_the_first_of_equal_ones():
    for vocab in (1, 1000, 9001):
        x = draw(torch.float32, 3, vocab).round()
        for logits in (x, x.bfloat16(), x.half(), torch.full_like(x, -torch.inf)):
            assert torch.equal(argmax(logits), logits.argmax(-1))
    assert argmax(torch.full((2, 5000), torch.nan, device=DEVICE)).tolist() == [0, 0]


def test_draws_are_those_of_the_reference():
    for rows, vocab in ((0, 5), (1, 1), (3, 17), (2, 1000), (2, 9000)):
        logits = draw(torch.float32, rows, vocab)
        seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), device=DEVICE)
        positions = torch.randint(0, 2**20, (rows,), device=DEVICE)
        for x in (logits, logits.masked_fill(logits > 1, -torch.inf)):
            assert torch.equal(
                sample_gumbel(x, seeds, positions), sampling.sample_gumbel.reference(x, seeds, positions)
            )


@pytest.mark.sampled(2)
@each_dtype
def test_drafts_are_accepted_or_resampled_as_by_the_reference(dtype):
    """In one part and in two; with excluded tokens, equal distributions, NaN, no draft, and no allowed token."""
    torch.manual_seed(0)
    for places, vocab in ((0, 5), (1, 1), (16, 40), (2, 4101)):
        p, q = draw(torch.float32, places, vocab), draw(torch.float32, vocab, places).t()
        kind = torch.arange(places, device=DEVICE)[:, None] % 8
        q = torch.where(kind < 3, p + q / 4, q).masked_fill((kind == 1) & (q < 1), -torch.inf)
        q = torch.where(kind == 2, p, q).masked_fill((kind == 3) & (q > 3), torch.nan)
        p = p.masked_fill((kind == 4) & (p < 1), -torch.inf)
        seeds = torch.randint(-(2**63), 2**63 - 1, (places,), device=DEVICE)
        positions = torch.randint(0, 2**20, (places,), device=DEVICE)
        drafts = sampling.sample_gumbel.reference(q.to(dtype).float(), draft_ops.draft_seeds(seeds), positions)
        drafts = torch.where(kind[:, 0] == 5, -1, drafts)
        nothing = torch.full_like(p, -torch.inf)
        for target, drafter in (
            (p, q.to(dtype)),
            (torch.where(kind == 6, nothing, p), torch.where(kind == 7, nothing, q)),
        ):
            arguments = target, drafter, drafts, seeds, positions
            wanted = draft_ops.accept_or_resample.reference(*arguments)
            assert torch.equal(accept_or_resample(*arguments), wanted)


def test_kept_tokens_are_counted_as_by_the_reference():
    torch.manual_seed(0)
    token_ids = torch.randint(0, 2, (10, 60), device=DEVICE).int()
    for counts in ((), (1,), (40,), (3, 0, 1, 9, 17)):
        places = torch.tensor(counts, dtype=torch.int64, device=DEVICE)
        rows = torch.arange(len(counts), device=DEVICE).repeat_interleave(places)
        positions = torch.arange(len(rows), device=DEVICE) % 50
        for shift in (0, 1):  # all drafts are accepted, or some
            sampled = token_ids[rows, positions + 1].long() * (1 - shift) + shift
            starts = torch.cat([places.new_zeros(1), places.cumsum(0)])
            arguments = token_ids, rows, positions, sampled, starts
            assert torch.equal(count_kept(*arguments), draft_ops.count_kept.reference(*arguments))
