"""Products with weights of 8 and 4 bits: in integers if their codes are integers, with values of a table
(quantized_linear.cpp), or with float8 (float8_linear.cpp)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.ops.cpu.build import kernel
from quire.ops.cpu.dtypes import CODES
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


@dataclass(frozen=True)
class QuantizedPanels:
    """A QuantizedMatrix in panels. form: the matrix without its rows, for its other properties. table: its own."""

    form: QuantizedMatrix
    codes: Panels
    scales: Panels
    offsets: Panels | None
    table: Tensor | None
    bits: int
    out_features: int

    @property
    def by_row(self) -> dict[str, Tensor]:
        """What has as many rows as the matrix, or somewhat more."""
        parts = {"codes": self.codes, "scales": self.scales, "offsets": self.offsets}
        return {name: part.data for name, part in parts.items() if part is not None}

    def rows(self, start: int, stop: int) -> "QuantizedPanels":
        """The outputs from start to stop, both of which are multiples of PANEL, in the same memory."""
        offsets = None if self.offsets is None else self.offsets.part(start, stop)
        codes, scales = self.codes.part(start, stop), self.scales.part(start, stop)
        return replace(self, codes=codes, scales=scales, offsets=offsets, out_features=stop - start)

    def pick(self, ids: Tensor) -> QuantizedMatrix:
        """The outputs `ids`."""
        codes = self.codes.pick(ids).view(self.form.codes.dtype)
        offsets = None if self.offsets is None else self.offsets.pick(ids)
        return replace(self.form, codes=codes, scales=self.scales.pick(ids), offsets=offsets)


def _in_two_bytes(target: Target) -> bool:
    return on_cpu(target) and target.dtype is not torch.float32


@quantized_linear.implementation("cpu_dense", supports=on_cpu)
def quantized_linear_dense(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """Dequantizes the weight in each product, for models in float32 and for forms that cannot be in panels."""
    offsets, parts = torch.tensor([0, len(x)]), []
    for start, stop, dense in dense_parts(weight, x.dtype):
        part_bias = None if bias is None else bias[None, start:stop]
        parts.append(grouped_linear_cpu(x, dense[None], part_bias, offsets))
    return torch.cat(parts, dim=-1) if parts else x.new_empty(len(x), 0)


@quantized_linear.implementation("cpu", supports=_in_two_bytes)
def quantized_linear_cpu(x: Tensor, weight: QuantizedMatrix | QuantizedPanels, bias: Tensor | None) -> Tensor:
    """Rounds activations to 8 bits, with a scale for each row and group, if the weight's codes are integers."""
    if isinstance(weight, QuantizedMatrix):  # a form that cannot be in panels
        return quantized_linear_dense(x, weight, bias)  # type: ignore[no-any-return]
    return _multiply(x, weight, bias, weight.out_features, None)


def _multiply(
    x: Tensor, weight: QuantizedPanels, bias: Tensor | None, outs: int, bounds: Tensor | None
) -> Tensor:  # fmt: skip
    """outs, bounds: of each expert, if the weights are those of several."""
    form = weight.form
    check_width(x.shape[1], form.num_inputs or form.in_features)
    x = x if form.order is None else x[:, form.order]
    rows = x.shape[0]
    stride, last = x.stride()
    if last != 1:
        x, stride = x.contiguous(), form.in_features
    out = x.new_empty(rows, outs)
    inputs = x.data_ptr(), stride, rows, weight.codes.data.data_ptr(), weight.scales.data.data_ptr()
    others = (
        outs, form.in_features, form.group, None if bias is None else bias.data_ptr(),
        None if bounds is None else bounds.data_ptr(), weight.out_features // outs, out.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    if form.codes.is_floating_point():
        kernel("quire_float8_linear", "ipllpplllpplpi")(CODES[x.dtype], *inputs, *others)
        return out
    kernel("quire_quantized_linear", "iipllpppplllpplpi")(
        CODES[x.dtype], weight.bits, *inputs, None if weight.offsets is None else weight.offsets.data.data_ptr(),
        None if weight.table is None else weight.table.data_ptr(), *others,
    )  # fmt: skip
    return out


def _pack(matrix: QuantizedMatrix) -> QuantizedMatrix | QuantizedPanels:
    word_inputs = 32 // matrix.bits  # inputs in a word
    if matrix.group % word_inputs and matrix.group < matrix.in_features:
        return matrix
    scales, offsets = matrix.effective_scales(), matrix.effective_offsets()
    form = replace(matrix.rows(0, 0), scales=scales[:0], offsets=None if offsets is None else offsets[:0], factors=None)
    codes, in_panels = Panels.of(matrix.codes.view(torch.uint8)), None if offsets is None else Panels.of(offsets)
    table = None if matrix.table is None else tensor_of(matrix.table, matrix.codes.device)
    return QuantizedPanels(form, codes, Panels.of(scales), in_panels, table, matrix.bits, matrix.out_features)


@grouped_quantized_linear.implementation("cpu", supports=_in_two_bytes)
def grouped_quantized_linear_cpu(
    x: Tensor, weight: QuantizedMatrix | QuantizedPanels, bias: Tensor | None, offsets: Tensor
) -> Tensor:  # fmt: skip
    if isinstance(weight, QuantizedMatrix):
        return grouped_quantized_linear.reference(x, weight, bias, offsets)  # type: ignore[no-any-return]
    return _multiply(x, weight, bias, weight.out_features // (len(offsets) - 1), offsets)


def _join(weights: Sequence[object]) -> QuantizedPanels | None:
    """The weights of all experts in one, if they have the same form and consist of whole panels."""
    panels = [weight for weight in weights if isinstance(weight, QuantizedPanels)]
    if len(panels) < len(weights) or any(part.out_features % PANEL for part in panels):
        return None
    first = panels[0]
    if any(part.bits != first.bits or not alike(part.form, first.form) for part in panels):
        return None

    def joined(parts: Sequence[Panels]) -> Panels:
        data = torch.cat([part.data for part in parts])
        return replace(parts[0], data=data, rows=len(data))

    offsets = [part.offsets for part in panels if part.offsets is not None]
    return replace(
        first, codes=joined([part.codes for part in panels]), scales=joined([part.scales for part in panels]),
        offsets=joined(offsets) if offsets else None, out_features=sum(part.out_features for part in panels),
    )  # fmt: skip


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
        CODES[weight.dtype], weight.data_ptr(), out_features, in_features, bits, group, factors.data_ptr(),
        len(factors), codes.data_ptr(), scales.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return QuantizedMatrix(codes, scales, group, in_features)


quantized_linear_cpu.pack = _pack  # type: ignore[attr-defined]
