"""One-byte weights, float8 or int8, with a scale for each tensor, channel, group or block."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.checkpoints.formats.packing import integer_matrix
from quire.checkpoints.formats.scheme import Groups, Scheme, slot
from quire.layers.build import Builder
from quire.layers.linear import LinearShape
from quire.layers.specs import OutputPart
from quire.ops.reference.quantized import QuantizedMatrix


@dataclass(frozen=True)
class ScaledBytes(Scheme):
    """weight: dtype [out, in], with a scale for each block. block: (outputs, inputs) of a block; -1 means all.

    The scales are [ceil(out / outputs), ceil(in / inputs)]; a single scale may have any shape. If not symmetric, there
    are zero points of the same shape. Activations are never quantized, even if the config requests it: this is more
    accurate.
    """

    dtype: torch.dtype
    block: tuple[int, int]
    marker: str = "weight_scale"
    symmetric: bool = True

    def inputs_together(self, name: str) -> int:
        return max(self.block[1], 1)

    def load(self, builder: Builder, shape: LinearShape, part: OutputPart) -> Callable[[], QuantizedMatrix]:
        if shape.transposed:
            raise ValueError(f"{part.name}: a transposed weight cannot be quantized in this format")
        name = part.name
        outputs = slice(part.start, part.stop)
        inputs = slice(shape.start, shape.stop)
        groups = Groups.of(shape, self.block[1])
        height = part.rows if self.block[0] == -1 else self.block[0]
        bands = slice(part.start // height, -(-part.stop // height))

        def per_block(suffix: str, dtype: torch.dtype) -> Tensor:
            if self.block == (-1, -1):
                return slot(builder, f"{name}.{suffix}", dtype, ())
            whole = -(-part.rows // height), groups.count
            return slot(builder, f"{name}.{suffix}", dtype, whole, bands, groups.picked)

        def per_output(values: Tensor) -> Tensor:
            values = values.view(-1, groups.picked.stop - groups.picked.start).repeat_interleave(height, 0)
            return groups.spread(values[part.start - bands.start * height :][: part.stop - part.start]).contiguous()

        weight = slot(builder, f"{name}.weight", self.dtype, (part.rows, shape.in_features), outputs, inputs)
        scales = per_block(self.marker, torch.float32)
        zero_point = None if self.symmetric else per_block("weight_zero_point", torch.int8)

        def make() -> QuantizedMatrix:
            if self.dtype.is_floating_point:  # use one dtype for scales, so that fused parts become one matrix
                return QuantizedMatrix(weight, per_output(scales), groups.size, shape.stop - shape.start)
            zeros = None if zero_point is None else per_output(zero_point).int() + 128
            return integer_matrix(weight.view(torch.uint8) ^ 128, 8, per_output(scales), groups.size, zeros)

        return make
