"""Rows rounded to 8 bits: alone, with the norm or the activation that makes them, and as inputs of products."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")
import torch
from packaging.version import Version

from quire.layers.norm import RMSNorm, RoundingNorm
from quire.ops import OPS, Target
from quire.ops.reference import quantized as reference
from quire.ops.reference.quantized import QuantizedMatrix, RoundedRows, quantize, quantized_linear
from quire.ops.triton import linear, rounding
from quire.ops.triton.elementwise import add_rms_norm, silu_and_mul
from quire.ops.triton.targets import INTERPRETED
from quire.platform.gpu.cards import CARDS
from support.engines import GREEDY, generate, make_llm
from support.triton_kernels import posing

pytestmark = [
    pytest.mark.usefixtures("interpreter", "_on_an_h100"),
    pytest.mark.skipif(not INTERPRETED, reason="poses as another card"),
]
CODES = [torch.float8_e4m3fn, torch.int8]


@pytest.fixture
def _on_an_h100():
    yield from posing(CARDS["sm_90"])


def same(made: RoundedRows, wanted: RoundedRows) -> None:
    assert made.dtype == wanted.dtype
    torch.testing.assert_close(made.scales, wanted.scales, rtol=1e-6, atol=0)
    torch.testing.assert_close(made.codes.float(), wanted.codes.float(), rtol=2**-3, atol=1)  # neighbours at most
    assert (made.codes.float() != wanted.codes.float()).sum() <= 0.01 * made.codes.numel()


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_kernels_round_what_separate_ones_do_bit_for_bit(code, dtype):
    torch.manual_seed(0)
    for rows, dim in ((3, 80), (1, 256), (0, 64)):
        x, residual, weight = torch.randn(rows, dim).to(dtype), torch.randn(rows, dim).to(dtype), torch.rand(dim)
        for factors in (weight, weight.to(dtype)):
            normed, total = add_rms_norm(x.clone(), residual.clone(), factors, 1e-6)
            made, stream = rounding.add_rms_norm_rounded(x.clone(), residual.clone(), factors, 1e-6, code)
            wanted = rounding.round_rows(normed, code)
            assert torch.equal(stream, total)
            assert torch.equal(made.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
            assert torch.equal(made.scales, wanted.scales)
            same(made, reference.add_rms_norm_rounded.reference(x, residual, factors, 1e-6, code)[0])
        wide = torch.randn(rows, 2 * dim).to(dtype)
        made, wanted = rounding.silu_and_mul_rounded(wide, code), rounding.round_rows(silu_and_mul(wide), code)
        assert torch.equal(made.codes.view(torch.uint8), wanted.codes.view(torch.uint8))
        assert torch.equal(made.scales, wanted.scales)
        same(made, reference.silu_and_mul_rounded.reference(wide, code))
        same(rounding.round_rows(wide, code), reference.round_rows.reference(wide, code))


def weights(outs: int, ins: int) -> QuantizedMatrix:
    return QuantizedMatrix(torch.randn(outs, ins).to(torch.float8_e4m3fn), torch.rand(outs, 1) / 8, ins, ins)


@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="one scale for each row on CPUs")
@pytest.mark.parametrize("rows", [3, 64, 65, 130])
def test_float8_products_of_more_than_64_rows_are_torchs(rows, monkeypatch):
    torch.manual_seed(rows)
    packed = linear.quantized_linear_scaled_mm.pack(weights(48, 64))
    calls = []
    scaled_mm = torch._scaled_mm

    def recorded(a, b, **options):
        calls.append((a.shape, b.shape))
        assert a.is_contiguous()
        assert b.t().is_contiguous()  # columns, as the library needs
        assert (options["scale_a"].shape, options["scale_b"].shape) == ((rows, 1), (1, 48))
        assert options["scale_b"].is_contiguous()
        return scaled_mm(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", recorded)
    x, bias = torch.randn(rows, 64).bfloat16(), torch.randn(48).bfloat16()
    rounded = rounding.round_rows(x, torch.float8_e4m3fn)
    wanted = quantized_linear.reference(rounded.dequantize().float(), packed, bias.float())
    for inputs in (x, rounded):
        product = linear.quantized_linear_scaled_mm(inputs, packed, bias)
        assert (product.dtype, product.shape) == (torch.bfloat16, (rows, 48))
        torch.testing.assert_close(product.float(), wanted, rtol=2**-6, atol=2**-5)
    assert len(calls) == 2 * (rows > 64)


def test_other_products_are_those_of_the_own_kernel(monkeypatch):
    """Groups of inputs, codes that are integers, sizes that the library does not support, and cards without float8."""
    monkeypatch.setattr(torch, "_scaled_mm", None)
    x = torch.randn(70, 128).bfloat16()
    plain = weights(48, 128)
    for matrix in (
        replace(plain, scales=torch.rand(48, 2), group=64),
        quantize.reference(torch.randn(48, 128), 8, 128),
        weights(24, 128),
    ):
        packed = linear.quantized_linear_triton.pack(matrix)
        product = linear.quantized_linear_scaled_mm(x, packed, None)
        torch.testing.assert_close(product, linear.quantized_linear_triton(x, packed, None))
    for _ in posing(CARDS["sm_80"]):
        packed = linear.quantized_linear_triton.pack(plain)
        linear.quantized_linear_scaled_mm(x, packed, None)
        assert linear.quantized_linear_scaled_mm.rounds(packed, torch.bfloat16) is None


def test_which_implementation_is_chosen():
    gpu = torch.device("cuda", 0)
    op = OPS["quantized_linear"]
    assert op.choose(Target(gpu, torch.bfloat16)).name == "scaled-mm"
    assert op.choose(Target(gpu, torch.float16)).name == "triton"
    assert op.choose(Target(gpu, torch.bfloat16, batch_invariant=True)).name == "triton-fixed"
    assert op.choose(Target(gpu, torch.bfloat16), "triton").name == "triton"


def test_inputs_are_rounded_only_if_the_product_would_do_so():
    rounds = linear.quantized_linear_triton.rounds
    plain = linear.quantized_linear_triton.pack(weights(48, 128))
    assert rounds(plain, torch.bfloat16) == torch.float8_e4m3fn
    assert rounds(plain, torch.float32) is None
    assert rounds(replace(plain, order=torch.arange(128)), torch.bfloat16) is None
    eight = linear.quantized_linear_triton.pack(quantize.reference(torch.randn(48, 128), 8, 64))
    assert rounds(eight, torch.float16) == torch.int8
    four = linear.quantized_linear_triton.pack(quantize.reference(torch.randn(48, 128), 4, 64))
    assert rounds(four, torch.float16) is None


@pytest.mark.parametrize("option", ["fp8", "int8"])
def test_a_model_rounds_in_its_norms_and_activations_and_gives_the_same_tokens(checkpoints, monkeypatch, option):
    """The kernels of products, norms and activations are those of GPUs; the others are those of the CPU."""
    names = ("quantized_linear", "round_rows", "add_rms_norm_rounded", "silu_and_mul_rounded")
    for name in names:
        best = next(i for i in OPS[name].implementations if i.name == "triton")
        monkeypatch.setattr(OPS[name], "implementations", [replace(best, supports=lambda target: True)])
    prompts = [[5, 9, 13], list(range(20, 33))]
    texts = []
    for fuses in (True, False):
        if not fuses:
            monkeypatch.setattr("quire.checkpoints.formats.scheme.QuantizedWeight.rounding", lambda self: None)
        llm = make_llm(checkpoints.path("llama"), dtype="bfloat16", quantization=option)
        layer = llm.core.executor.runner.model.layers[0]
        assert isinstance(layer.attention_norm, RoundingNorm if fuses else RMSNorm)
        assert isinstance(layer.mlp_norm, RoundingNorm if fuses else RMSNorm)
        texts.append([o.outputs[0].token_ids for o in generate(llm, prompts, GREEDY.clone(max_tokens=4))])
    assert texts[0] == texts[1]
