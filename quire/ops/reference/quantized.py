"""Products with weights that stay quantized in memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from quire.ops.reference.elementwise import add_rms_norm, silu_and_mul
from quire.ops.registry import ANYWHERE, declare, declare_invariant


def largest_code(code: torch.dtype) -> float:
    return 448.0 if code.is_floating_point else 127.0


_CHUNK = 2**18  # elements of a weight that are dequantized at a time, so that they stay in the processor's cache


@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight [out, in] as codes with a scale, and possibly an offset, for each group of neighbouring inputs of a row:

        weight[o, i] = (codes[o, i] - centre) * scale[o, i // group]                  without offsets
        weight[o, i] = codes[o, i] * scale[o, i // group] + offset[o, i // group]     with them

    codes: four bits in uint8 [out, ceil(in / 2)], with input 2 j in the low half of byte j and input 2 j + 1 in the
        high half, centre 8; or eight bits in uint8 [out, in], centre 128; or int8 or float8_e4m3fn [out, in], centre 0
    scales, offsets: [out, groups], groups = ceil(in / group); floats, or integers that are multiplied by factors
    factors: [out, groups / n, 1 or 2], for the scales and the offsets of n neighbouring groups (GGUF's super-blocks)
    order: [in], int64; column j above is input order[j] (GPTQ's act-order); None if column j is input j
    table: 16 values: the unscaled weight for each code of four bits, instead of code - centre, for codes that are not
        integers, such as four-bit floats. It excludes offsets.
    num_inputs: the number of inputs if some inputs have several columns, all but one of which are zeros; in_features is
        the number of columns
    code_bits: if less than `bits`, codes have no more than 2^code_bits values: the lowest ones, or those around the
        centre if there are no offsets
    """

    codes: Tensor
    scales: Tensor
    group: int
    in_features: int
    offsets: Tensor | None = None
    factors: Tensor | None = None
    order: Tensor | None = None
    num_inputs: int | None = None
    table: tuple[float, ...] | None = None
    code_bits: int = 8

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def bits(self) -> int:
        return 4 if self.codes.shape[1] < self.in_features else 8

    @property
    def by_row(self) -> dict[str, Tensor]:
        """The tensors that have a row for each output."""
        names = ("codes", "scales", "offsets", "factors")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    def rows(self, start: int, stop: int) -> "QuantizedMatrix":
        """Return the outputs [start, stop), as views."""
        return replace(self, **{name: tensor[start:stop] for name, tensor in self.by_row.items()})  # type: ignore[arg-type]

    def pick(self, ids: Tensor) -> "QuantizedMatrix":
        """Return the outputs `ids`."""
        return replace(self, **{name: tensor[ids] for name, tensor in self.by_row.items()})  # type: ignore[arg-type]

    def dense_rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weights of the outputs `ids`: [len(ids), in]"""
        return self.pick(ids).dequantize().to(dtype)

    def dequantize(self) -> Tensor:
        """Return the weight [out, in], float32, with the inputs in their original order."""
        codes = self.single_codes()
        weight = codes.float() if self.table is None else tensor_of(self.table, codes.device)[codes.int()]
        if self.table is None and self.offsets is None and codes.dtype is torch.uint8:
            weight -= 1 << (self.bits - 1)
        weight = torch.nn.functional.pad(weight, (0, -self.in_features % self.group))
        weight = weight.view(len(weight), -1, self.group)
        weight *= self.effective_scales()[..., None]
        offsets = self.effective_offsets()
        if offsets is not None:
            weight += offsets[..., None]
        weight = weight.flatten(1)[:, : self.in_features]
        if self.order is None:
            return weight
        inputs = weight.new_zeros(len(weight), self.num_inputs or self.in_features)
        return inputs.index_add_(1, self.order, weight)

    def single_codes(self) -> Tensor:
        """[out, in], one code in each element"""
        if self.bits == 8:
            return self.codes
        return torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(1)[:, : self.in_features]

    def effective_scales(self) -> Tensor:
        """[out, groups], float32"""
        return self._multiplied(self.scales, 0)

    def effective_offsets(self) -> Tensor | None:
        """[out, groups], float32"""
        return None if self.offsets is None else self._multiplied(self.offsets, 1)

    def _multiplied(self, values: Tensor, index: int) -> Tensor:
        values = values.float()
        if self.factors is not None:
            repeats = values.shape[1] // self.factors.shape[1]
            values = values * self.factors[..., index].float().repeat_interleave(repeats, 1)
        return values


@dataclass(frozen=True)
class RoundedRows:
    """The inputs of a product, rounded to 8 bits: x[r, i] = codes[r, i] * scales[r].

    codes: [rows, in], float8_e4m3fn or int8. scales: [rows], float32. dtype: the type of x, and of the product.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.codes)

    def dequantize(self) -> Tensor:
        return (self.codes.float() * self.scales[:, None]).to(self.dtype)


@cache
def tensor_of(table: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the table as a tensor that stays on the device, since steps in CUDA graphs cannot copy it there."""
    return torch.tensor(table, dtype=dtype, device=device)


def concatenate(matrices: Sequence[QuantizedMatrix]) -> list[QuantizedMatrix]:
    """Concatenate the outputs of all matrices, in order, into as few matrices as their forms allow."""
    runs: list[list[QuantizedMatrix]] = []
    for matrix in matrices:
        if runs and alike(runs[-1][0], matrix):
            runs[-1].append(matrix)
        else:
            runs.append([matrix])
    return [_concatenated(run) for run in runs]


def _concatenated(run: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Concatenate the outputs of matrices of the same form."""
    if len(run) == 1:
        return run[0]
    names = run[0].by_row
    return replace(run[0], **{name: torch.cat([getattr(matrix, name) for matrix in run]) for name in names})  # type: ignore[arg-type]


def alike(a: QuantizedMatrix, b: QuantizedMatrix) -> bool:
    """Return whether one matrix could contain the outputs of both."""
    forms = [(m.group, m.code_bits, {name: (t.dtype, t.shape[1:]) for name, t in m.by_row.items()}) for m in (a, b)]
    return forms[0] == forms[1] and _same(a.order, b.order) and a.table == b.table


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


# Candidate scales of a group, as multiples of the scale that clips no weight. With four bits, slightly clipping the
# largest weights reduces the error.
FACTORS = {8: (1.0,), 4: tuple(1.04 - 0.04 * i for i in range(10))}


@declare_invariant(*ANYWHERE)
def quantize(weight: Tensor, bits: int, group: int) -> QuantizedMatrix:
    """Quantize a dense weight [out, in] to 8 or 4 bits, with a scale for each `group` neighbouring inputs of a row.

    The weight of the largest magnitude gets the lowest code, regardless of its sign, so that all codes are used. This
    gives one scale for each of FACTORS. The scale with the least squared error decides the codes. Then the scale that
    fits these codes best (least squares) is stored.
    """
    out_features, in_features = weight.shape
    centre = float(1 << (bits - 1))
    group = min(group, in_features)
    x = torch.nn.functional.pad(weight.float(), (0, -in_features % group)).view(out_features, -1, group)
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    best = torch.zeros_like(extreme)
    least_error = torch.full_like(extreme, torch.inf)

    def codes_for(scale: Tensor) -> Tensor:
        return torch.where(scale != 0, x / scale, 0.0).round_().clamp_(-centre, centre - 1)

    for factor in FACTORS[bits]:
        scale = extreme / -centre * factor
        error = (codes_for(scale) * scale - x).square().sum(-1, keepdim=True)
        best = torch.where(error < least_error, scale, best)
        least_error = torch.minimum(error, least_error)
    codes = codes_for(best)
    squares = codes.square().sum(-1)
    scales = torch.where(squares > 0, (codes * x).sum(-1) / squares, 0.0)
    stored = (codes + centre).to(torch.uint8).flatten(1)[:, :in_features]
    if bits == 4:
        stored = torch.nn.functional.pad(stored, (0, in_features % 2), value=8)
        stored = stored[:, ::2] | stored[:, 1::2] << 4
    return QuantizedMatrix(stored.contiguous(), scales, group, in_features)


def dense_parts(weight: QuantizedMatrix, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """Dequantize as many outputs at a time as fit into the cache: (start, stop, weights [stop - start, in])."""
    step = max(1, _CHUNK // weight.in_features)
    outputs = weight.out_features
    for start in range(0, outputs, step):
        stop = min(start + step, outputs)
        yield start, stop, weight.rows(start, stop).dequantize().to(dtype)


@declare_invariant(*ANYWHERE)
def round_rows(x: Tensor, code: torch.dtype) -> RoundedRows:
    """Round each row to 8 bits, so that its largest magnitude gets the largest code. x: [rows, in]; code:
    float8_e4m3fn or int8."""
    wide = x.float()
    scales = wide.abs().amax(1).div(largest_code(code)).clamp(min=1e-30) if x.numel() else wide.new_empty(len(x))
    scaled = wide / scales[:, None]
    return RoundedRows((scaled if code.is_floating_point else scaled.round()).to(code), scales, x.dtype)


@declare_invariant("cpu")  # where no product has the attribute `rounds`, so this is not called
def add_rms_norm_rounded(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, code: torch.dtype
) -> tuple[RoundedRows, Tensor]:
    """add_rms_norm, whose first result is rounded by round_rows. Both arguments may be overwritten."""
    normed, residual = add_rms_norm.reference(x, residual, weight, eps)
    return round_rows.reference(normed, code), residual


@declare_invariant("cpu")  # where no product has the attribute `rounds`, so this is not called
def silu_and_mul_rounded(x: Tensor, code: torch.dtype) -> RoundedRows:
    """silu_and_mul, whose result is rounded by round_rows."""
    rounded: RoundedRows = round_rows.reference(silu_and_mul.reference(x), code)
    return rounded


@declare
def quantized_linear(x: Tensor | RoundedRows, weight: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """x W^T + b, with W dequantized to x's type. x: [tokens, in], bias: [out] -> [tokens, out].

    An implementation may have an attribute `pack`, like implementations of `linear`. One that rounds x to 8 bits may
    have an attribute `rounds`: a function from a packed weight and x's type to the type of the codes, or None if it
    does not round x for this weight. x may be RoundedRows of this type.
    """
    x = x.dequantize() if isinstance(x, RoundedRows) else x
    parts = []
    for start, stop, dense in dense_parts(weight, x.dtype):
        parts.append(torch.nn.functional.linear(x, dense, None if bias is None else bias[start:stop]))
    return torch.cat(parts, dim=-1) if parts else x.new_empty(len(x), 0)


@declare_invariant("cpu")  # there, layers call it only for joined weights, and the reference joins none
def grouped_quantized_linear(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Like grouped_linear, with the experts' weights concatenated. weight: [experts * out, in], bias: [experts, out].
    The weight may have been packed for quantized_linear. An implementation may have an attribute `join`: it joins the
    experts' weights, each packed for quantized_linear, or returns None if it cannot."""
    bounds = offsets.tolist()
    outs = weight.out_features // (len(bounds) - 1)
    out = x.new_empty(len(x), outs)
    for e, (start, stop) in enumerate(pairwise(bounds)):
        part = weight.rows(e * outs, (e + 1) * outs)
        out[start:stop] = quantized_linear.reference(x[start:stop], part, None if bias is None else bias[e])
    return out
