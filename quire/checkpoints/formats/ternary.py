"""BitNet's linear layers (arXiv:2402.17764): weights are -1, 0 or 1 times a scale, and inputs are rounded to 8 bits."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.checkpoints.formats.packing import integer_matrix
from quire.checkpoints.formats.scheme import QuantizedWeight, Scheme, slot
from quire.layers.build import Builder
from quire.layers.linear import LinearShape, LinearWeight, Rows
from quire.layers.specs import OutputPart
from quire.ops.reference.quantized import QuantizedMatrix

_SMALLEST = 1e-5  # lower bound of means and maxima, to avoid divisions by 0


class TernaryWeight(QuantizedWeight):
    def __call__(self, x: Rows, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        wide = x.float()
        scale = 127 / wide.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST)
        return super().__call__(((wide * scale).round().clamp(-128, 127) / scale).to(x.dtype), bias)

    def rounding(self) -> torch.dtype | None:
        return None


@dataclass(frozen=True)
class Ternary(Scheme):
    """The weights of a whole tensor have one scale, the mean of their absolute values.

    With the marker "weight_scale", they are packed: uint8 [out / 4, in], where bits 2 i and 2 i + 1 of row r are weight
    + 1 of output i * out / 4 + r. The scale multiplies the weights, or divides them. With the marker "weight", the
    checkpoint contains floats [out, in], which are rounded on loading. In memory, each weight takes four bits.
    """

    marker: str
    multiplies: bool

    def __call__(self, builder: Builder, shape: LinearShape) -> LinearWeight:
        if (shape.start, shape.stop) != (0, shape.in_features):
            raise ValueError(
                "BitNet rounds the inputs of a layer by the largest of them, so ranks cannot divide them; "
                "set tensor_parallel_size to 1"
            )
        return TernaryWeight(builder, [self.load(builder, shape, part) for part in shape.parts])

    def inputs_together(self, name: str) -> int:
        return 1

    def load(self, builder: Builder, shape: LinearShape, part: OutputPart) -> Callable[[], QuantizedMatrix]:
        name = part.name
        inputs = shape.in_features
        packed = self.marker == "weight_scale"
        whole = (-(-part.rows // 4) if packed else part.rows), inputs
        dtype = torch.uint8 if packed else torch.float32
        weight = slot(builder, f"{name}.weight", dtype, whole, slice(0, whole[0]), slice(0, inputs))
        scale = slot(builder, f"{name}.weight_scale", torch.float32, ()) if packed else None

        def make() -> QuantizedMatrix:
            if scale is not None:
                codes = torch.cat([weight >> shift & 3 for shift in (0, 2, 4, 6)])
                size = scale if self.multiplies else 1 / scale
            else:
                size = weight.abs().mean().clamp(min=_SMALLEST)
                codes = ((weight / size).round().clamp(-1, 1) + 1).to(torch.uint8)
            codes = codes[part.start : part.stop]
            scales = size.float().repeat(len(codes), 1)
            return integer_matrix(codes + 7, 4, scales, inputs)

        return make
