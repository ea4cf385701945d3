"""Four-bit weights in the order of the Marlin kernel (https://github.com/IST-DASLab/marlin), as saved by AutoGPTQ and
AutoAWQ."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.checkpoints.formats.packing import integer_matrix, unpack
from quire.checkpoints.formats.scheme import Groups, Scheme, slot
from quire.checkpoints.formats.settings import SchemeOf, Settings, check_field, group_size_of
from quire.layers.build import Builder
from quire.layers.linear import LinearShape
from quire.layers.specs import OutputPart
from quire.ops.reference.quantized import QuantizedMatrix

_INPUTS, _OUTPUTS = 16, 64  # of a tile, whose codes are contiguous
_WORDS = _INPUTS * _OUTPUTS // 8


@dataclass(frozen=True)
class Marlin(Scheme):
    """codes: int32 [in / 16, out * 2], tiles of 16 inputs and 64 outputs; scales: [groups, out]. Zero points are 8.

    A tile consists of four blocks of 16 outputs. In binary, let i3 i2 i1 i0 be the input's index in the tile, b1 b0 the
    block's, and o3 o2 o1 o0 the output's index in the block. The position of a code in the tile is

        o2 o1 o0 i2 i1 b1 b0 i0 o3 i3

    so one word contains the eight codes of a block that one thread of a warp multiplies. Scales are also in thread
    order: among 64 outputs, those with the same o2 o1 o0 are adjacent. With a single group, among 32 outputs, those
    with the same o2 o1 are adjacent.
    """

    group_size: int
    codes: str = "B"
    scales: str = "s"

    @property
    def marker(self) -> str:  # type: ignore[override]
        return self.codes

    def inputs_together(self, name: str) -> int:
        return max(self.group_size, 1)

    def load(self, builder: Builder, shape: LinearShape, part: OutputPart) -> Callable[[], QuantizedMatrix]:
        name = part.name
        rows = part.rows
        if shape.in_features % _INPUTS or rows % _OUTPUTS:
            raise ValueError(
                f"{name} has {shape.in_features} inputs and {rows} outputs, but Marlin's layout needs "
                f"multiples of {_INPUTS} and {_OUTPUTS}"
            )
        groups = Groups.of(shape, self.group_size)
        first = part.start // _OUTPUTS
        last = -(-part.stop // _OUTPUTS)
        tiles = slice(shape.start // _INPUTS, -(-shape.stop // _INPUTS))
        words = slice(first * _WORDS, last * _WORDS)
        columns = slice(first * _OUTPUTS, last * _OUTPUTS)
        whole = shape.in_features // _INPUTS, rows // _OUTPUTS * _WORDS
        packed = slot(builder, f"{name}.{self.codes}", torch.int32, whole, tiles, words)
        stored = slot(builder, f"{name}.{self.scales}", torch.float32, (groups.count, rows), groups.picked, columns)
        outputs = slice(part.start - columns.start, part.stop - columns.start)
        inputs = slice(shape.start % _INPUTS, shape.start % _INPUTS + shape.stop - shape.start)

        def make() -> QuantizedMatrix:
            fields = unpack(packed, 4, packed.shape[1] * 8).view(len(packed), -1, 8, 4, 4, 2, 2, 2)
            codes = fields.permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(last * _OUTPUTS - columns.start, -1)
            if groups.count == 1:
                scales = stored.view(1, -1, 4, 4, 2).transpose(2, 3).flatten(1)
            else:
                scales = stored.view(len(stored), -1, 8, 8).transpose(2, 3).flatten(1)
            spread = groups.spread(scales.t()[outputs])
            return integer_matrix(codes[outputs, inputs], 4, spread, groups.size)

        return make


def scheme_of(settings: Settings) -> SchemeOf:
    """Raises ValueError for settings that the layout does not support: other bits, zero points, act-order."""
    check_field(settings, "bits", (4,), 4)
    check_field(settings, "sym", (True,), True)
    check_field(settings, "desc_act", (False, None))
    check_field(settings, "zero_point", (False, None))
    names = ("qweight", "scales") if "awq" in str(settings["quant_method"]).lower() else ("B", "s")
    scheme = Marlin(group_size_of(settings), *names)
    return lambda name: scheme
