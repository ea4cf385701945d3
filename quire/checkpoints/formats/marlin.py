"""Weights of four bits in the order in which the kernel Marlin (https://github.com/IST-DASLab/marlin) reads them, as
AutoGPTQ and AutoAWQ save them."""

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

_INPUTS, _OUTPUTS = 16, 64  # of a tile, whose codes follow each other
_WORDS = _INPUTS * _OUTPUTS // 8


@dataclass(frozen=True)
class Marlin(Scheme):
    """codes: int32 [in / 16, out * 2], tiles of 16 inputs and 64 outputs; scales: [groups, out]. Zero points are 8.

    A tile consists of four blocks of 16 outputs. With the input's number in the tile i3 i2 i1 i0, the block's b1 b0 and
    the output's number in the block o3 o2 o1 o0, all in binary, the place of a code in the tile is

        o2 o1 o0 i2 i1 b1 b0 i0 o3 i3

    so that one word has the eight codes of a block that a thread of a warp multiplies. Scales are in the order of the
    threads, too: of 64 outputs, those with the same o2 o1 o0 follow each other. With a single group, these are
    32 outputs, and those with the same o2 o1.
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
    """Raises ValueError for what the layout does not have: other bits, zero points, act-order."""
    check_field(settings, "bits", (4,), 4)
    check_field(settings, "sym", (True,), True)
    check_field(settings, "desc_act", (False, None))
    check_field(settings, "zero_point", (False, None))
    names = ("qweight", "scales") if "awq" in str(settings["quant_method"]).lower() else ("B", "s")
    scheme = Marlin(group_size_of(settings), *names)
    return lambda name: scheme
