"""Four-bit weights whose codes index a table of values: MXFP4, NVFP4, and bitsandbytes' nf4 and fp4."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.checkpoints.formats.packing import narrow, pack_pairs
from quire.checkpoints.formats.scheme import Groups, QuantizedWeight, Scheme, slot
from quire.layers.build import Builder
from quire.layers.linear import LinearShape, LinearWeight
from quire.layers.specs import OutputPart
from quire.ops.reference.quantized import QuantizedMatrix

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0; the fourth bit is the sign
_FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)  # bitsandbytes, also with a sign bit
_NF4 = (  # QLoRA (arXiv:2305.14314), appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_TABLES = {"e2m1": (*_E2M1, *(-v for v in _E2M1)), "fp4": (*_FP4, *(-v for v in _FP4)), "nf4": _NF4}


@dataclass(frozen=True)
class TableCodes(Scheme):
    """`codes`: uint8 [out, in / 2], with the code of an even input in the low half of a byte; weight_scale: [out,
    groups].

    group: inputs per group. If rows do not consist of whole groups, the checkpoint's scales are for smaller groups.
    scales: their dtype; uint8 means exponents plus 127. whole_scale: the tensor that scales the whole weight, None if
    there is none. divides: whether whole_scale is a divisor.
    """

    table: str
    group: int
    scales: torch.dtype
    codes: str = "weight_packed"
    whole_scale: str | None = None
    divides: bool = False

    @property
    def marker(self) -> str:  # type: ignore[override]
        return self.codes if self.whole_scale is None else self.whole_scale

    def inputs_together(self, name: str) -> int:
        return self.group

    def load(self, builder: Builder, shape: LinearShape, part: OutputPart) -> Callable[[], QuantizedMatrix]:
        name = part.name
        outputs = slice(part.start, part.stop)
        groups = Groups.of(shape, math.gcd(self.group, shape.in_features), divisible=False)
        columns = slice(shape.start // 2, -(-shape.stop // 2))
        whole = (part.rows, -(-shape.in_features // 2))
        codes = slot(builder, f"{name}.{self.codes}", torch.uint8, whole, outputs, columns)
        whole = part.rows, groups.count
        scales = slot(builder, f"{name}.weight_scale", self.scales, whole, outputs, groups.picked)
        factor = None
        if self.whole_scale is not None:
            factor = slot(builder, f"{name}.{self.whole_scale}", torch.float32, ())
        return lambda: self._matrix(codes, scales, groups, shape, shape.start % 2, factor)

    def experts(
        self,
        builder: Builder,
        name: str,
        count: int,
        shape: LinearShape,
        rows: Sequence[slice],
        runs: Sequence[tuple[slice, slice]],
    ) -> list[LinearWeight]:
        """Return the weights of all experts in one tensor, as in gpt-oss: codes [experts, out, groups, 16], scales
        [experts, out, groups].

        rows: the checkpoint's outputs for each of the shape's parts. runs: see fused_experts.
        """
        groups = Groups.of(shape, self.group, divisible=False)
        experts = sum(here.stop - here.start for here, _ in runs)
        outputs = shape.parts[0].rows
        picked_groups = groups.picked.stop - groups.picked.start
        codes = builder.parameter(experts, shape.out_features, picked_groups, self.group // 2, dtype=torch.uint8)
        scales = builder.parameter(experts, shape.out_features, picked_groups, dtype=self.scales)
        builder.count(name, count * outputs * shape.in_features)
        for here, picked in runs:
            first = 0
            for part, pick in zip(shape.parts, rows, strict=True):
                last = first + part.stop - part.start
                for end, target, inner in (("weight_packed", codes, codes.shape[3:]), ("weight_scale", scales, ())):
                    whole = (count, outputs, groups.count, *inner)
                    everything = [slice(0, size) for size in inner]
                    picks = (picked, pick, groups.picked, *everything)
                    builder.quantized_part(f"{name}.{end}", target[here, first:last], whole, *picks)
                first = last
        skip = shape.start - groups.picked.start * self.group

        def weight(expert: int) -> LinearWeight:
            return QuantizedWeight(
                builder, [lambda: self._matrix(codes[expert].flatten(1), scales[expert], groups, shape, skip)]
            )

        return [weight(expert) for expert in range(experts)]

    def _matrix(
        self, codes: Tensor, scales: Tensor, groups: Groups, shape: LinearShape, skip: int, factor: Tensor | None = None
    ) -> QuantizedMatrix:
        """skip: inputs before the first one of the rank."""
        if scales.dtype is torch.uint8:  # powers of two are exact in bfloat16
            scales = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127).bfloat16()
        else:
            scales = scales.float()
        scales = narrow(groups.spread(scales))
        matrix = QuantizedMatrix(codes, scales, groups.size, shape.stop - shape.start, table=_TABLES[self.table])
        if skip % 2:
            single = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
            matrix = replace(matrix, codes=pack_pairs(single[:, skip:][:, : matrix.in_features]))
        elif skip or codes.shape[1] > -(-matrix.in_features // 2):
            matrix = replace(matrix, codes=codes[:, skip // 2 :][:, : -(-matrix.in_features // 2)].contiguous())
        if factor is not None:
            factor = 1 / factor if self.divides else factor
            matrix = replace(matrix, factors=factor.view(1, 1, 1).repeat(len(codes), 1, 1))
        return matrix


BITSANDBYTES_BLOCK = 64  # weights that share a scale; see checkpoints/bitsandbytes.py
MXFP4 = TableCodes("e2m1", 32, torch.uint8)
NVFP4 = TableCodes("e2m1", 16, torch.float8_e4m3fn, whole_scale="weight_global_scale", divides=True)
MODELOPT_NVFP4 = TableCodes("e2m1", 16, torch.float8_e4m3fn, codes="weight", whole_scale="weight_scale_2")
