"""Matrices in 8 and 4 bits: what they mean, products with them, and how dense ones become them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from quire.checkpoints.formats.packing import integer_matrix
from quire.ops import OPS, Target
from quire.ops.cpu.linear import grouped_linear_cpu, linear_cpu
from quire.ops.cpu.panels import Panels
from quire.ops.cpu.quantized_linear import (
    QuantizedPanels,
    grouped_quantized_linear_cpu,
    quantize_cpu,
    quantized_linear_cpu,
)
from quire.ops.reference.quantized import QuantizedMatrix, concatenate

Product = Callable[..., Tensor]
needs_kernels = pytest.mark.skipif(
    all(
        i.name != "cpu" or not i.supports(Target(torch.device("cpu"), torch.bfloat16))
        for i in OPS["quantize"].implementations
    ),
    reason="the CPU kernels cannot be compiled here",
)


def quantized_matrices() -> Iterator[QuantizedMatrix]:
    """All forms of codes, scales, offsets and factors, with and without a last group that is smaller."""
    for out, width, group in ((96, 64, 32), (7, 256, 16), (24, 70, 32), (40, 33, 33)):
        count = -(-width // group)
        scales, offsets = torch.rand(out, count) * 0.1, torch.randn(out, count) * 0.1
        four = torch.randint(0, 256, (out, -(-width // 2)), dtype=torch.uint8)
        eight = torch.randint(0, 256, (out, width), dtype=torch.uint8)
        for codes in (four, eight):
            yield QuantizedMatrix(codes, scales.half(), group, width)
            yield QuantizedMatrix(codes, scales, group, width, offsets.bfloat16())
            yield QuantizedMatrix(codes, scales, group, width, order=torch.randperm(width))
            sub = torch.randint(-30, 30, (out, count), dtype=torch.int8)
            yield QuantizedMatrix(codes, sub, group, width, factors=torch.rand(out, 1, 1).half())
            minima = torch.randint(0, 64, (out, count), dtype=torch.uint8)
            factors = torch.rand(out, 1 if count % 2 else count // 2, 2).half() * 0.01
            yield QuantizedMatrix(codes, minima.flip(0), group, width, minima, factors)
        for bits in (2, 3, 5, 6):
            codes, has_offsets = torch.randint(0, 1 << bits, (out, width), dtype=torch.uint8), bits in (2, 5)
            by_group = (minima.flip(0), minima, factors) if has_offsets else (sub, None, factors[..., :1])
            yield replace(integer_matrix(codes, bits, by_group[0], group, offsets=by_group[1]), factors=by_group[2])
        table = tuple(torch.randn(16).tolist())
        yield QuantizedMatrix(four, scales, group, width, table=table)
        yield QuantizedMatrix(four, sub, group, width, factors=torch.rand(out, 1, 1), table=table)
        yield QuantizedMatrix((torch.randn(out, width) * 2).to(torch.float8_e4m3fn), scales, group, width)


@pytest.mark.slow
def test_a_quantized_matrix_means_what_its_description_says():
    for matrix in quantized_matrices():
        centre = 0 if matrix.offsets is not None or matrix.codes.is_floating_point() else 2 ** (matrix.bits - 1)
        dense = torch.empty(matrix.out_features, matrix.in_features)
        for o in range(matrix.out_features):
            for j in range(matrix.in_features):
                code = (
                    matrix.codes[o, j].item() if matrix.bits == 8 else matrix.codes[o, j // 2].item() >> j % 2 * 4 & 15
                )
                g = j // matrix.group
                scale, offset = matrix.scales[o, g].item(), 0 if matrix.offsets is None else matrix.offsets[o, g].item()
                if matrix.factors is not None:
                    factors = matrix.factors[o, g * matrix.factors.shape[1] // matrix.scales.shape[1]].tolist()
                    scale, offset = scale * factors[0], offset * factors[-1]
                value = code - centre if matrix.table is None else matrix.table[code]
                dense[o, j if matrix.order is None else matrix.order[j]] = value * scale + offset
        torch.testing.assert_close(matrix.dequantize(), dense, rtol=1e-6, atol=1e-6)
        x, bias = torch.randn(3, matrix.in_features), torch.randn(matrix.out_features)
        made = OPS["quantized_linear"].reference(x, matrix, bias)
        torch.testing.assert_close(made, x @ dense.T + bias, rtol=1e-5, atol=1e-4)


def test_an_input_may_have_several_columns_of_which_one_is_not_zero():
    """So that a rank's parts of groups become groups of one size (checkpoints/formats/integers.py)."""
    torch.manual_seed(0)
    dense, codes = torch.zeros(8, 24), torch.full((8, 32), 128, dtype=torch.uint8)
    order = torch.cat([torch.randperm(24), torch.tensor([3, 3, 0, 23, 9, 9, 9, 1])])
    codes[:, :24] = torch.randint(0, 256, (8, 24))
    scales = torch.rand(8, 2) * 0.1
    dense[:, order[:24]] = (codes[:, :24].float() - 128) * scales.repeat_interleave(16, 1)[:, :24]
    matrix, x = QuantizedMatrix(codes, scales, 16, 32, order=order, num_inputs=24), torch.randn(3, 24)
    assert torch.equal(matrix.dequantize(), dense)
    torch.testing.assert_close(OPS["quantized_linear"].reference(x, matrix, None), x @ dense.T, rtol=1e-5, atol=1e-4)


def test_quantized_matrices_of_one_form_become_one():
    for matrix in quantized_matrices():
        halves = [matrix.rows(0, 3), matrix.rows(3, 3), matrix.rows(3, matrix.out_features)]
        (whole,) = concatenate(halves)
        assert torch.equal(whole.dequantize(), matrix.dequantize())
    others = list(quantized_matrices())
    assert torch.equal(
        torch.cat([m.dequantize() for m in concatenate(others[:13])]), torch.cat([m.dequantize() for m in others[:13]])
    )


def activations(rows: int, matrix: QuantizedMatrix, dtype: torch.dtype) -> Tensor:
    """Numbers of 8 bits, the largest 127, times a power of two in each group of the weight: rounding keeps them."""
    group = min(matrix.group, matrix.in_features)
    x = torch.randint(-127, 128, (rows, -(-matrix.in_features // group), group)).float()
    x[..., 0] = 127
    x *= 2.0 ** torch.randint(-8, -4, (*x.shape[:2], 1)) / (16 if dtype is torch.float16 else 1)  # or results overflow
    x = x.flatten(1)[:, : matrix.in_features]
    return (x if matrix.order is None else torch.empty_like(x).index_copy_(1, matrix.order, x)).to(dtype)


def check_products(product: Product, dtype: torch.dtype = torch.bfloat16) -> None:
    """Row counts around those that the kernels take at once; matrices of one panel, of several, of a part of one."""
    matrices = list(quantized_matrices())
    for out, width, group in ((200, 1000, 1000), (65, 512, 128), (1, 24, 8), (70, 4100, 4100)):
        for bits in (8, 4):
            codes = torch.randint(0, 256, (out, width * bits // 8), dtype=torch.uint8)
            scales = torch.rand(out, -(-width // group)) * 0.01
            matrices.append(QuantizedMatrix(codes, scales, group, width))
            matrices.append(QuantizedMatrix(codes, scales, group, width, scales * -7.5))
            if bits == 4:
                matrices.append(QuantizedMatrix(codes, scales, group, width, table=tuple(torch.randn(16).tolist())))
        for bits, offsets in ((3, None), (6, scales.half() * -30)):
            codes = torch.randint(0, 1 << bits, (out, width), dtype=torch.uint8)
            matrices.append(integer_matrix(codes, bits, scales, group, offsets=offsets))
        codes = torch.randint(0, 254, (out, width)).to(torch.uint8)
        matrices.append(QuantizedMatrix(without_nan(codes), scales * 0.1, group, width))
    in_panels, rtol = 0, 2**-8 if dtype is torch.bfloat16 else 2**-11
    for matrix in matrices:
        packed = product.pack(replace(matrix, **{name: t.clone() for name, t in matrix.by_row.items()}))
        if not isinstance(packed, QuantizedPanels):
            continue
        in_panels += 1
        assert packed.bits == min(matrix.bits, matrix.code_bits)
        ids = torch.randint(0, matrix.out_features, (5,))
        assert torch.equal(packed.pick(ids).dequantize(), matrix.dequantize()[ids])
        assert torch.equal(packed.dense_rows(ids, dtype), matrix.dequantize()[ids].to(dtype))
        for rows in (0, 1, 5, 7, 30, 250):
            x, bias = activations(rows, matrix, dtype), torch.randn(matrix.out_features).to(dtype)
            exact = x.double() @ matrix.dequantize().double().T
            made = product(x, packed, bias).double()
            torch.testing.assert_close(made, exact + bias.double(), rtol=rtol, atol=1e-3)
            if rows > 1:  # a row's result does not depend on the others, not by a bit
                assert torch.equal(product(x[1:2], packed, bias).double(), made[1:2])
                wide = torch.cat([x, x], dim=1)[:, : matrix.in_features]
                assert torch.equal(product(wide, packed, None), product(x, packed, None))
    assert in_panels > 30


def check_extreme_products(product: Product) -> None:
    """The largest sums of all formats: no partial sum overflows or saturates, for whatever signs."""
    for bits, group in ((2, 16), (3, 16), (4, 32), (4, 128), (5, 32), (6, 16), (6, 192), (8, 32), (8, 192)):
        for has_offsets in (False, True):
            codes = torch.tensor([0, 2**bits - 1], dtype=torch.uint8)[torch.randint(2, (64, 384))]
            codes[:2] = torch.tensor([[0], [2**bits - 1]])
            scales = torch.ones(64, 384 // group)
            offsets = scales * -(2 ** (bits - 1)) if has_offsets else None
            weight = codes.double() - 2 ** (bits - 1)  # panels may take the memory of the codes
            packed = product.pack(integer_matrix(codes, bits, scales, group, offsets=offsets))
            x = torch.tensor([[1], [-1]]).repeat(4, 384)
            x[2:] = torch.randint(2, (6, 384)) * 2 - 1
            for rows in (x, x[:3], x[:1], x[1:2], x[2:3]):
                made = product((rows * 127).bfloat16(), packed, None)
                assert torch.equal(made, (rows.double() * 127 @ weight.T).bfloat16())


def without_nan(codes: Tensor) -> Tensor:
    """float8's codes but those of NaN, 127 and 255, for numbers from 0 to 253."""
    return (codes + (codes >= 127)).view(torch.float8_e4m3fn)


def check_values_of_float8(product: Product) -> None:
    codes = without_nan(torch.arange(254, dtype=torch.uint8))
    packed = product.pack(QuantizedMatrix(codes[:, None].repeat(1, 8), torch.ones(254, 1), 8, 8))
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(product(torch.eye(8).to(dtype), packed, None), codes.to(dtype).repeat(8, 1))
    x = (torch.randn(50, 8) * torch.logspace(-6, 1, 50)[:, None]).half()  # has more digits than bfloat16
    exact = x.double() @ codes.double().expand(8, -1)
    torch.testing.assert_close(product(x, packed, None).double(), exact, rtol=2**-10, atol=1e-5)


def check_that_activations_are_rounded_to_8_bits(product: Product) -> None:
    for group in (256, 32):
        x, weight = torch.randn(50, 256).bfloat16(), torch.eye(256) * 127
        x[3] = 0
        scales = torch.full((256, 256 // group), 1.0)
        packed = product.pack(QuantizedMatrix((weight + 128).to(torch.uint8), scales, group, 256))
        parts = x.float().unflatten(1, (-1, group))
        step = parts.abs().amax(-1, keepdim=True) / 127
        error = (product(x, packed, None).float() / 127).unflatten(1, (-1, group)) - parts
        assert (error.abs() <= 0.51 * step + 2**-8 * parts.abs()).all()


def check_quantizing(quantize: Callable[..., QuantizedMatrix]) -> None:
    """As good as the reference, and the same but for ties."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for out, width, bits, group in ((40, 256, 4, 128), (3, 200, 4, 128), (9, 300, 8, 2**30), (5, 33, 4, 16)):
            weight = torch.randn(out, width, dtype=torch.float64).pow(3).to(dtype)
            weight[1] = 0
            made, wanted = quantize(weight, bits, group), OPS["quantize"].reference(weight, bits, group)
            assert (made.bits, made.group, made.in_features) == (bits, min(group, width), width)
            assert (made.codes == wanted.codes).float().mean() > 0.98
            errors = [(m.dequantize() - weight).square().mean() for m in (made, wanted)]
            assert errors[0] <= 1.001 * errors[1]
            assert not made.dequantize()[1].any()


def test_the_reference_quantizes_with_small_errors():
    check_quantizing(OPS["quantize"].reference)
    weight = torch.randn(64, 1024)
    for bits, bound in ((8, 0.015), (4, 0.12)):
        matrix = OPS["quantize"].reference(weight, bits, 128)
        assert (matrix.dequantize() - weight).square().mean().sqrt() < bound
    absmax = weight.unflatten(1, (-1, 128)).abs().amax(-1, keepdim=True) / 7
    plain = (weight.unflatten(1, (-1, 128)) / absmax).round() * absmax
    assert (matrix.dequantize() - weight).square().sum() < 0.8 * (plain.flatten(1) - weight).square().sum()


@pytest.mark.slow
@needs_kernels
def test_products_in_panels_are_what_they_are_defined_to_be():
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        check_products(quantized_linear_cpu, dtype)
    check_extreme_products(quantized_linear_cpu)
    check_values_of_float8(quantized_linear_cpu)
    check_that_activations_are_rounded_to_8_bits(quantized_linear_cpu)


@needs_kernels
def test_products_refuse_inputs_of_another_width():
    """They would read what lies behind the rows."""
    matrix = quantized_linear_cpu.pack(quantize_cpu(torch.randn(32, 64), 8, 32))
    dense = Panels.of(torch.randn(32, 64).bfloat16())
    for product, weight in ((quantized_linear_cpu, matrix), (linear_cpu, dense)):
        with pytest.raises(ValueError, match="weights for 64 inputs got 62"):
            product(torch.zeros(3, 62).bfloat16(), weight, None)
    with pytest.raises(ValueError, match="weights for 64 inputs got 62"):
        grouped_linear_cpu(torch.zeros(3, 62), torch.zeros(1, 32, 64), None, torch.tensor([0, 3]))


@needs_kernels
def test_the_kernel_quantizes_as_the_reference_does():
    torch.manual_seed(0)
    for implementation in OPS["quantize"].implementations[1:]:
        check_quantizing(implementation.function)


def test_what_cannot_be_in_panels_is_computed_by_the_reference():
    for matrix in quantized_matrices():
        x = torch.randn(3, matrix.in_features).bfloat16()
        wanted = OPS["quantized_linear"].reference(x, matrix, None)
        torch.testing.assert_close(quantized_linear_cpu(x, matrix, None), wanted)


def test_products_of_experts_are_those_of_each_experts_own_weight():
    torch.manual_seed(0)
    product = OPS["grouped_quantized_linear"].reference
    for matrix in quantized_matrices():
        experts = next(n for n in (4, 7, 1) if matrix.out_features % n == 0)
        outs, offsets = matrix.out_features // experts, torch.randint(0, 5, (experts,)).cumsum(0)
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), offsets))
        x, bias = torch.randn(int(offsets[-1]), matrix.in_features), torch.randn(experts, outs)
        weight = matrix.dequantize().view(experts, outs, -1)
        wanted = [x[offsets[e] : offsets[e + 1]] @ weight[e].T + bias[e] for e in range(experts)]
        torch.testing.assert_close(product(x, matrix, bias, offsets), torch.cat(wanted), rtol=1e-4, atol=1e-3)


@pytest.mark.sampled(2)
@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [(1, 0, 2), (0, 0, 0), (150, 1, 90)])
def test_joined_experts_give_the_bits_of_each_experts_own_product(counts, dtype):
    torch.manual_seed(0)
    check_joined_experts(counts, dtype)


def check_joined_experts(counts: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> None:
    bounds = torch.tensor([0, *counts]).cumsum(0)
    for matrix in quantized_matrices():
        experts = [replace(matrix, **{n: _repeated(t, 128) for n, t in matrix.by_row.items()}) for _ in counts]
        packed = [quantized_linear_cpu.pack(expert) for expert in experts]
        x, bias = torch.randn(sum(counts), matrix.in_features).to(dtype), torch.randn(3, 128).to(dtype)
        joined = grouped_quantized_linear_cpu.join(packed)
        if not isinstance(packed[0], QuantizedPanels):
            assert joined is None
            continue
        made = grouped_quantized_linear_cpu(x, joined, bias, bounds)
        for e, (start, stop) in enumerate(pairwise(bounds.tolist())):
            assert torch.equal(made[start:stop], quantized_linear_cpu(x[start:stop], packed[e], bias[e]))
        own = joined.rows(128, 256)
        assert torch.equal(quantized_linear_cpu(x, own, None), quantized_linear_cpu(x, packed[1], None))
        assert all(
            part.data_ptr() != other.data_ptr()
            for part, other in zip(own.by_row.values(), packed[1].by_row.values(), strict=True)
        )


def _repeated(tensor: Tensor, rows: int) -> Tensor:
    """Rows of the tensor in another order, with repetitions."""
    return tensor[torch.randint(len(tensor), (rows,))]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_experts_give_the_bits_of_packed_weights(dtype):
    torch.manual_seed(0)
    check_packed_experts(dtype)


def check_packed_experts(dtype: torch.dtype) -> None:
    bounds = torch.tensor([0, 3, 3, 140])
    for width in (33, 256):
        weight = (torch.randn(3, 192, width) / width**0.5).to(dtype)
        x, bias = torch.randn(140, width).to(dtype), torch.randn(3, 192).to(dtype)
        made = grouped_linear_cpu(x, grouped_linear_cpu.pack(weight.clone()), bias, bounds)
        for e, (start, stop) in enumerate(pairwise(bounds.tolist())):
            assert torch.equal(made[start:stop], linear_cpu(x[start:stop], Panels.of(weight[e].clone()), bias[e]))
    assert isinstance(grouped_linear_cpu.pack(weight[:, :100]), Tensor), "not in whole panels"
