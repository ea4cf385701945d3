"""Matrix products that torch lacks: grouped by expert, and with weights that stay quantized in memory. This module also
computes dense products of few rows.

With 8-bit weights, the inputs are also rounded to 8 bits, with a scale for each token. Other weights are dequantized on
use, and so are all weights of float32 models.

Products are computed transposed: weights are the left operand. Tensor cores process more rows of the left operand than
columns of the right one, and decoding has many outputs and few tokens.
"""

from collections.abc import Sequence
from functools import partial

import torch
import triton
from torch import Tensor

from quire.ops.reference.elementwise import grouped_linear, linear
from quire.ops.reference.quantized import (
    QuantizedMatrix,
    RoundedRows,
    concatenate,
    grouped_quantized_linear,
    quantized_linear,
    tensor_of,
)
from quire.ops.registry import Function, Op, Target
from quire.ops.triton.float8 import converts_float8
from quire.ops.triton.linear_kernels import _product, _total
from quire.ops.triton.packed import PackedMatrix, pack, words_of
from quire.ops.triton.rounding import round_rows
from quire.ops.triton.targets import on_gpu, on_gpu_in_any_batch, overlap, precision
from quire.ops.triton.tiles import suits_few_rows, tile_of
from quire.platform.gpu.cards import card_of

_MOST_ROWS_OF_OWN = 64  # of a float8 product that Quire's kernel computes rather than torch's library
_FIXED_ROWS = 64  # rows per expert for the choice of tiles and splits if these must not depend on the batch


def _on_gpu_in_16_bits(target: Target) -> bool:
    return on_gpu(target) and target.dtype.itemsize == 2


@linear.implementation("triton-few-rows", supports=_on_gpu_in_16_bits, invariant_on=())
def linear_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """With few rows, loading the weights takes all the time, so each program has many loads in flight, and no second
    kernel adds parts. torch's library computes all other products."""
    (outs, ins), size = weight.shape, x.dtype.itemsize
    if suits_few_rows(card_of(x.device), len(x), outs, ins, size) and weight.is_contiguous():
        return _launch(x, None, weight, None, bias, None, "few", x.dtype, False)
    product: Tensor = linear.reference(x, weight, bias)
    return product


@grouped_linear.implementation("triton", supports=on_gpu, invariant_on=())
def grouped_linear_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, fixed: bool = False
) -> Tensor:
    """fixed: tile and splits do not depend on the number of rows, so results do not depend on the batch."""
    kind = "float32" if x.dtype is torch.float32 else "dense"
    return _launch(x, None, weight.flatten(0, 1), None, bias, offsets, kind, x.dtype, fixed)


@quantized_linear.implementation("triton", supports=on_gpu, invariant_on=())
def quantized_linear_triton(
    x: Tensor | RoundedRows, weight: QuantizedMatrix, bias: Tensor | None, fixed: bool = False
) -> Tensor:
    """fixed: see grouped_linear_triton."""
    return _quantized(x, weight, bias, None, fixed)


def _on_gpu_in_bfloat16(target: Target) -> bool:
    return on_gpu(target) and target.dtype is torch.bfloat16


@quantized_linear.implementation("scaled-mm", supports=_on_gpu_in_bfloat16, invariant_on=())
def quantized_linear_scaled_mm(x: Tensor | RoundedRows, weight: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """torch's product of float8 (CUTLASS or cuBLAS) for more than 64 rows, if each output has one scale and the card
    has float8. All other products are those of "triton". With fewer rows, the time is that of loading the weights.

    Sums are exact enough without fast accumulation (`use_fast_accum`), which keeps about 14 bits.
    """
    packed = weight if isinstance(weight, PackedMatrix) else pack(weight)
    outs, ins = packed.codes.shape
    scaled = (
        len(x) > _MOST_ROWS_OF_OWN
        and packed.codes.is_floating_point()
        and packed.group >= ins
        and packed.factors is None
        and not outs % 16
        and not ins % 16
        and rounding_of(packed, x.dtype, packed.codes.device) is not None
    )
    if not scaled:
        return _quantized(x, packed, bias, None, False)
    return scaled_mm(x if isinstance(x, RoundedRows) else round_rows(x, packed.codes.dtype), packed, bias)


def scaled_mm(rows: RoundedRows, weight: PackedMatrix, bias: Tensor | None) -> Tensor:
    """Return torch's product of float8. weight: with one scale for each output."""
    return torch._scaled_mm(
        rows.codes,
        weight.codes.t(),
        scale_a=rows.scales[:, None],
        scale_b=weight.scales.t().float(),
        bias=bias,
        out_dtype=rows.dtype,
    )


@grouped_quantized_linear.implementation("triton", supports=on_gpu, invariant_on=())
def grouped_quantized_linear_triton(
    x: Tensor, weight: QuantizedMatrix, bias: Tensor | None, offsets: Tensor, fixed: bool = False
) -> Tensor:
    """fixed: see grouped_linear_triton."""
    return _quantized(x, weight, bias, offsets, fixed)


def rounding_of(weight: QuantizedMatrix, dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the type of 8 bits to which products with the weight round their inputs of type `dtype`, or None if they
    compute with inputs as they are. weight: packed."""
    codes = weight.codes
    whole = weight.group >= weight.in_features
    if (
        dtype is torch.float32
        or weight.bits == 4
        or weight.offsets is not None
        or (codes.is_floating_point() and not converts_float8(device))
        or not (whole or weight.group % 64 == 0)
    ):
        return None
    return codes.dtype


def _rounding(weight: QuantizedMatrix, dtype: torch.dtype) -> torch.dtype | None:
    """The attribute `rounds` of quantized_linear. Inputs that have another order are not rounded before the product."""
    return None if weight.order is not None else rounding_of(weight, dtype, weight.codes.device)


def _quantized(
    x: Tensor | RoundedRows, weight: QuantizedMatrix, bias: Tensor | None, bounds: Tensor | None, fixed: bool
) -> Tensor:
    """bounds: the offsets of the experts' rows, None if all rows have the same weight."""
    packed = weight if isinstance(weight, PackedMatrix) else pack(weight)
    if isinstance(x, Tensor):
        x = x if packed.order is None else x[:, packed.order]
        code = rounding_of(packed, x.dtype, x.device)
        if code is None:
            return _launch(x, None, packed.codes, packed, bias, bounds, _kind(packed, x.dtype), x.dtype, fixed)
        rows = round_rows(x, code)
    else:
        rows = x
    kind = "float8" if packed.codes.is_floating_point() else "int8"
    return _launch(rows.codes, rows.scales, packed.codes, packed, bias, bounds, kind, rows.dtype, fixed)


def _kind(packed: PackedMatrix, dtype: torch.dtype) -> str:
    """Return the kind of a product whose inputs are not rounded, see tiles.py."""
    if dtype is torch.float32:
        return "float32"
    if packed.bits == 8:
        return "wide"
    return "table" if packed.table else "four" if packed.offsets is None else "offsets"


def _scaling(weight: PackedMatrix, step: int) -> tuple[str, int]:
    """Return (SCALING, INS) for a product whose loop would read `step` words of a row of weights at a time."""
    if weight.group >= weight.in_features and weight.offsets is None:
        return "row", step
    if weight.bits == 4 and weight.run == weight.group:
        return "quarters", min(step, weight.group & -weight.group)
    group, rest = divmod(weight.group, 4 if weight.bits == 4 else 1)  # in words
    even = group & -group  # the largest power of two that divides it
    if not rest and even >= min(step, 64):
        return "step", min(step, even)
    return ("groups" if not rest and even == group and group >= 4 else "any"), step


def _launch(
    x: Tensor,
    x_scales: Tensor | None,
    codes: Tensor,
    weight: PackedMatrix | None,
    bias: Tensor | None,
    bounds: Tensor | None,
    kind: str,
    dtype: torch.dtype,
    fixed: bool,
) -> Tensor:
    """codes: the codes of all outputs, or dense weights. weight: the format of the codes. kind: see tiles.py. dtype:
    the type of results."""
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    rows, ins = x.shape
    experts = 1 if bounds is None else len(bounds) - 1
    outs = len(codes) // experts
    out = x.new_empty(rows, outs, dtype=dtype)
    if not out.numel():
        return out
    per_word = 1
    form = "dense"
    scaling = "none"
    group = 1
    scales = x
    offsets = None
    factors = None
    table = None
    if weight is not None:
        group = weight.group
        form = "integer"
        scales = weight.scales
        offsets = weight.offsets
        factors = weight.factors
        table = weight.table
        if weight.bits == 4:
            per_word = 4
            form = "four" if table is None else "table"
            codes = codes.view(torch.int16)
        if codes.is_floating_point():
            form = "float8"
            codes = codes if x_scales is not None else codes.view(torch.uint8)
    card = card_of(x.device)
    length = codes.shape[1]
    tile = tile_of(card, kind, _FIXED_ROWS * experts if fixed else rows, outs, length, experts)
    step = tile.ins
    if weight is not None:
        scaling, step = _scaling(weight, step)
    span = triton.cdiv(length, step * tile.splits) * step
    splits = triton.cdiv(length, span)
    parts = out if splits == 1 else torch.empty(splits, rows, outs, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(rows, tile.rows)
    if bounds is not None:
        tiles = min(rows, rows // tile.rows + experts)  # each expert has at most one tile that is not full
    is_native = converts_float8(x.device)
    has_ptx = card.backend == "cuda" and dtype is not torch.float32
    overlapped = overlap(x.device)
    _product[(tiles * triton.cdiv(outs, tile.outs), splits)](
        parts,
        x,
        x if x_scales is None else x_scales,
        codes,
        codes if table is None or has_ptx else tensor_of(table, x.device, dtype),
        scales,
        scales if offsets is None else offsets,
        scales if factors is None else factors,
        x if bias is None else bias.contiguous(),
        x if bounds is None else bounds,
        rows,
        tiles,
        experts,
        outs,
        ins,
        length,
        span,
        x.stride(0),
        codes.stride(0),
        scales.stride(0),
        scales.stride(1),
        form,
        words_of(table, dtype) if table and has_ptx else None,
        x_scales is not None,
        scaling,
        offsets is not None,
        factors is not None,
        8 if form == "four" and offsets is None else 0,
        1 if scaling in ("none", "row") else group,
        1 if weight is None else weight.run,
        bias is not None,
        0 if bounds is None else triton.next_power_of_2(experts),
        length % step == 0 and ins == length * per_word,
        is_native,
        has_ptx,
        tile.rows,
        tile.outs,
        step,
        precision(dtype),
        bool(overlapped),
        num_warps=tile.warps,
        num_stages=tile.stages,
        enable_fp_fusion=True,
        **overlapped,
        **(card.most_registers(tile.warps, tile.programs) if offsets is not None or table else {}),
    )
    if splits > 1:
        _total[(triton.cdiv(out.numel(), 512),)](
            out, parts, rows, outs, splits, 512, bool(overlapped), num_warps=2, enable_fp_fusion=True, **overlapped
        )
    return out


def _register_fixed(op: Op, function: Function) -> Function:
    """Also register `function` with a fixed tile, for results that must not depend on the batch."""
    return op.implementation("triton-fixed", supports=on_gpu_in_any_batch)(partial(function, fixed=True))


def _join(weights: Sequence[object]) -> object | None:
    """Join the weights of all experts, if they have the same form."""
    matrices = [weight for weight in weights if isinstance(weight, QuantizedMatrix)]
    merged = concatenate(matrices) if len(matrices) == len(weights) else []
    return pack(merged[0]) if len(merged) == 1 else None


_register_fixed(grouped_linear, grouped_linear_triton)
_fixed = _register_fixed(grouped_quantized_linear, grouped_quantized_linear_triton)
for _function in (grouped_quantized_linear_triton, _fixed):
    _function.join = _join  # type: ignore[attr-defined]
_of_quantized = (quantized_linear_triton, quantized_linear_scaled_mm)
for _function in (*_of_quantized, _register_fixed(quantized_linear, quantized_linear_triton)):
    _function.pack = pack  # type: ignore[attr-defined]
    _function.rounds = _rounding  # type: ignore[attr-defined]
