"""Products with 8-bit and 4-bit weights: with integer codes, with codes that index a table (quantized_linear.cpp), or
with float8 (float8_linear.cpp)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.ops.cpu.build import CODES, kernel
from quire.ops.cpu.elementwise import on_cpu
from quire.ops.cpu.linear import check_width, grouped_linear_cpu
from quire.ops.cpu.panels import PANEL, Panels
from quire.ops.memory import lasting
from quire.ops.reference.quantized import (
    FACTORS,
    QuantizedMatrix,
    alike,
    dense_parts,
    grouped_quantized_linear,
    quantize,
    quantized_linear,
    tensor_of,
)
from quire.ops.registry import Target

# The kernels' numbering of the types of scales, offsets and factors (scales.h).
_TYPES = {**CODES, torch.uint8: 3, torch.int8: 4}


@dataclass(frozen=True)
class QuantizedPanels:
    """A QuantizedMatrix in panels. form: the matrix without its rows, for its other properties. table: its table.

    codes: 2, 3, 5 or 6 bits as in narrow_codes.h, or 4 or 8 bits as in the matrix
    """

    form: QuantizedMatrix
    codes: Panels
    scales: Panels
    offsets: Panels | None
    factors: Panels | None
    table: Tensor | None
    bits: int
    out_features: int

    @property
    def by_row(self) -> dict[str, Tensor]:
        """The tensors that have one row for each row of the matrix, or slightly more rows."""
        return {name: panels.data for name, panels in self._panels().items()}

    def rows(self, start: int, stop: int) -> "QuantizedPanels":
        """Return a view of the outputs [start, stop); both are multiples of PANEL."""
        parts: dict[str, Any] = {name: panels.part(start, stop) for name, panels in self._panels().items()}
        return replace(self, **parts, out_features=stop - start)

    def pick(self, ids: Tensor) -> QuantizedMatrix:
        """Return the outputs `ids`."""
        parts = {name: panels.pick(ids) for name, panels in self._panels().items()}
        form = self.form
        codes = parts["codes"]
        if self.bits not in (4, 8):
            wide = codes.new_empty(len(codes), form.codes.shape[1])
            kernel("quire_widen_codes", "ipllipi")(
                self.bits,
                codes.data_ptr(),
                *wide.shape,
                _base(form, self.bits),
                wide.data_ptr(),
                torch.get_num_threads(),
            )
            codes = wide
        parts["codes"] = codes.view(form.codes.dtype)
        if form.factors is not None:
            parts["factors"] = parts["factors"].view(len(codes), *form.factors.shape[1:])
        return replace(form, **parts)  # type: ignore[arg-type]

    def dense_rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weights of the outputs `ids`: [len(ids), in]"""
        form = self.form
        is_plain = (
            form.codes.dtype is torch.uint8
            and self.bits == 8
            and self.scales.data.dtype is torch.float32
            and self.offsets is None
            and self.factors is None
            and self.table is None
            and form.order is None
        )
        if not is_plain:
            return self.pick(ids).dequantize().to(dtype)
        rows = torch.empty(len(ids), form.in_features, dtype=dtype)
        ids = ids.contiguous()
        kernel("quire_byte_rows", "ipplllplpi")(
            CODES[dtype],
            self.codes.data.data_ptr(),
            self.scales.data.data_ptr(),
            self.out_features,
            form.in_features,
            form.group,
            ids.data_ptr(),
            len(ids),
            rows.data_ptr(),
            torch.get_num_threads(),
        )
        return rows

    def joined(self, others: Sequence["QuantizedPanels"]) -> "QuantizedPanels":
        """Concatenate the outputs of this matrix and of others of the same form, each of which consists of whole
        panels."""
        parts = {
            name: [panels, *(other._panels()[name] for other in others)] for name, panels in self._panels().items()
        }
        data: dict[str, Any] = {name: Panels.joined(panels) for name, panels in parts.items()}
        return replace(self, **data, out_features=sum(part.out_features for part in (self, *others)))

    def _panels(self) -> dict[str, Panels]:
        names = ("codes", "scales", "offsets", "factors")
        return {name: panels for name in names if (panels := getattr(self, name)) is not None}


def _may_round(target: Target) -> bool:
    return on_cpu(target) and (target.dtype is not torch.float32 or target.narrow is not None)


@quantized_linear.implementation("cpu_dense", supports=on_cpu)
def quantized_linear_dense(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """Dequantize the weight in each product, for models that are float32 throughout and for forms that cannot be in
    panels."""
    offsets = torch.tensor([0, len(x)])
    parts = []
    for start, stop, dense in dense_parts(weight, x.dtype):
        part_bias = None if bias is None else bias[None, start:stop]
        parts.append(grouped_linear_cpu(x, dense[None], part_bias, offsets))
    return torch.cat(parts, dim=-1) if parts else x.new_empty(len(x), 0)


@quantized_linear.implementation("cpu", supports=_may_round)
def quantized_linear_cpu(x: Tensor, weight: QuantizedMatrix | QuantizedPanels, bias: Tensor | None) -> Tensor:
    """If the weight's codes are integers, activations are rounded to 8 bits, with a scale for each row and group."""
    if isinstance(weight, QuantizedMatrix):  # a form that cannot be in panels
        return quantized_linear_dense(x, weight, bias)  # type: ignore[no-any-return]
    return _multiply(x, weight, bias, weight.out_features, None)


def _multiply(x: Tensor, weight: QuantizedPanels, bias: Tensor | None, outs: int, bounds: Tensor | None) -> Tensor:
    """outs, bounds: the outputs and rows of each expert, if there are several."""
    form = weight.form
    check_width(x.shape[1], form.num_inputs or form.in_features)
    x = x if form.order is None else x[:, form.order]
    rows = x.shape[0]
    stride, last = x.stride()
    if last != 1:
        x = x.contiguous()
        stride = form.in_features
    out = x.new_empty(rows, outs)
    inputs = x.data_ptr(), stride, rows, weight.codes.data.data_ptr()
    others = (
        outs,
        form.in_features,
        form.group,
        None if bias is None else bias.data_ptr(),
        None if bounds is None else bounds.data_ptr(),
        weight.out_features // outs,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if form.codes.is_floating_point():
        kernel("quire_float8_linear", "ipllpplllpplpi")(CODES[x.dtype], *inputs, weight.scales.data.data_ptr(), *others)
        return out
    kinds = 1 if form.factors is None else form.factors.shape[2]
    kernel("quire_quantized_linear", "iipllppipipillplllpplpi")(
        CODES[x.dtype],
        weight.bits,
        *inputs,
        *_numbers(weight.scales),
        *_numbers(weight.offsets),
        *_numbers(weight.factors),
        0 if weight.factors is None else weight.factors.columns,
        kinds,
        None if weight.table is None else weight.table.data_ptr(),
        *others,
    )
    return out


def _numbers(panels: Panels | None) -> tuple[int | None, int]:
    """Return the panels' address and type."""
    return (None, 0) if panels is None else (panels.data.data_ptr(), _TYPES[panels.data.dtype])


def _pack(matrix: QuantizedMatrix) -> QuantizedMatrix | QuantizedPanels:
    word_inputs = 32 // matrix.bits  # inputs in a word
    if matrix.group % word_inputs and matrix.group < matrix.in_features:
        return matrix
    bits = min(matrix.bits, matrix.code_bits)
    codes = matrix.codes.view(torch.uint8)
    if bits in (2, 3, 5, 6):
        unit = 32 if bits % 2 else 16  # codes in whole words
        width = -(-matrix.in_features // unit) * unit * bits // 8
        codes = lasting.empty(len(codes), width, dtype=torch.uint8, device=codes.device)
        kernel("quire_narrow_codes", "ipllipi")(
            bits,
            matrix.codes.data_ptr(),
            *matrix.codes.shape,
            _base(matrix, bits),
            codes.data_ptr(),
            torch.get_num_threads(),
        )
    else:
        bits = matrix.bits
    of_groups = {name: getattr(matrix, name) for name in ("scales", "offsets", "factors")}
    if matrix.codes.is_floating_point() or any(t is not None and t.dtype not in _TYPES for t in of_groups.values()):
        scales = matrix.effective_scales()
        offsets = matrix.effective_offsets()
        of_groups = {"scales": scales, "offsets": offsets, "factors": None}
    empty: dict[str, Any] = {name: None if t is None else t[:0] for name, t in of_groups.items()}
    form = replace(matrix, codes=matrix.codes[:0], **empty)
    packed: dict[str, Any] = {name: None if t is None else Panels.of(t.flatten(1)) for name, t in of_groups.items()}
    table = None if matrix.table is None else tensor_of(matrix.table, matrix.codes.device)
    return QuantizedPanels(form, Panels.of(codes), **packed, table=table, bits=bits, out_features=matrix.out_features)


def _base(matrix: QuantizedMatrix, bits: int) -> int:
    """Return the lowest code of a matrix whose codes have 2^bits values."""
    return 0 if matrix.offsets is not None else (1 << (matrix.bits - 1)) - (1 << (bits - 1))


@grouped_quantized_linear.implementation("cpu", supports=_may_round)
def grouped_quantized_linear_cpu(
    x: Tensor, weight: QuantizedMatrix | QuantizedPanels, bias: Tensor | None, offsets: Tensor
) -> Tensor:
    if isinstance(weight, QuantizedMatrix):
        return grouped_quantized_linear.reference(x, weight, bias, offsets)  # type: ignore[no-any-return]
    return _multiply(x, weight, bias, weight.out_features // (len(offsets) - 1), offsets)


def _join(weights: Sequence[object]) -> QuantizedPanels | None:
    """Join the weights of all experts, if they have the same form and consist of whole panels."""
    panels = [weight for weight in weights if isinstance(weight, QuantizedPanels)]
    if len(panels) < len(weights) or any(part.out_features % PANEL for part in panels):
        return None
    first = panels[0]
    if any(part.bits != first.bits or not alike(part.form, first.form) for part in panels):
        return None
    return first.joined(panels[1:])


grouped_quantized_linear_cpu.join = _join  # type: ignore[attr-defined]


@quantize.implementation("cpu", supports=on_cpu)
def quantize_cpu(weight: Tensor, bits: int, group: int) -> QuantizedMatrix:
    weight = weight.contiguous()
    out_features, in_features = weight.shape
    group = min(group, in_features)
    width = in_features if bits == 8 else -(-in_features // 2)
    codes = lasting.empty(out_features, width, dtype=torch.uint8, device=weight.device)
    scales = lasting.empty(out_features, -(-in_features // group), dtype=torch.float32, device=weight.device)
    factors = torch.tensor(FACTORS[bits])
    kernel("quire_quantize", "ipllilpippi")(
        CODES[weight.dtype],
        weight.data_ptr(),
        out_features,
        in_features,
        bits,
        group,
        factors.data_ptr(),
        len(factors),
        codes.data_ptr(),
        scales.data_ptr(),
        torch.get_num_threads(),
    )
    return QuantizedMatrix(codes, scales, group, in_features)


quantized_linear_cpu.pack = _pack  # type: ignore[attr-defined]
