"""Weights quantized by HQQ (https://github.com/mobiusml/hqq), as transformers saves them, read without the package."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.checkpoints.formats.packing import integer_matrix, narrow
from quire.checkpoints.formats.scheme import Groups, Scheme, slot
from quire.checkpoints.formats.settings import SchemeOf, Settings, check_field
from quire.layers.build import Builder
from quire.layers.linear import LinearShape
from quire.layers.specs import OutputPart
from quire.ops.reference.quantized import QuantizedMatrix


@dataclass(frozen=True)
class HQQ(Scheme):
    """The weight's rows are concatenated and divided into groups: weight = (code - zero) * scale, with float zero
    points.

    W_q: uint8 [groups * bits / 8, group]; scale, zero: [groups, 1]. With four bits, the first half of the groups is in
    the high halves of the bytes; with fewer, the first quarter or eighth in the highest bits. group: weights per group;
    None if each row is one group. If groups span rows, the groups in memory are smaller, so that rows consist of whole
    groups.
    """

    bits: int
    group: int | None
    marker = "W_q"

    def inputs_together(self, name: str) -> int:
        return self.group or 1

    def load(self, builder: Builder, shape: LinearShape, part: OutputPart) -> Callable[[], QuantizedMatrix]:
        name = part.name
        outputs = slice(part.start, part.stop)
        width = shape.in_features
        group = self.group or width
        fields = 8 // self.bits
        count, rest = divmod(part.rows * width, group)
        if rest or count % fields:
            raise ValueError(f"{name} has {part.rows} x {width} weights, which group_size={group} does not divide")
        groups = Groups.of(shape, math.gcd(group, width), divisible=False)
        packed = _whole(builder, f"{name}.W_q", torch.uint8, count // fields, group)
        scale = _whole(builder, f"{name}.scale", torch.float32, count, 1)
        zero = _whole(builder, f"{name}.zero", torch.float32, count, 1)

        def make() -> QuantizedMatrix:
            shifts = range(8 - self.bits, -1, -self.bits)
            codes = torch.cat([packed >> shift & ((1 << self.bits) - 1) for shift in shifts]).view(part.rows, width)
            starts = torch.arange(groups.picked.start, groups.picked.stop) * groups.in_checkpoint
            first = (torch.arange(part.start, part.stop)[:, None] * width + starts).to(scale.device)
            scales, zeros = (groups.spread(values[first // group, 0]) for values in (scale, zero))
            codes = codes[outputs, shape.start : shape.stop]
            return integer_matrix(codes, self.bits, scales, groups.size, offsets=narrow(-zeros * scales))

        return make


def _whole(builder: Builder, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return slot(builder, name, dtype, shape, *(slice(0, size) for size in shape))


def scheme_of(settings: Settings) -> SchemeOf:
    """Settings are per kind of layer, such as "self_attn.q_proj", or the same for all layers. Raises ValueError for
    unsupported settings: three bits, groups of outputs (axis 0), codes stored as floats."""
    given: Any = settings.get("quant_config")
    if not isinstance(given, dict) or not given:
        raise ValueError(f"quantization_config has quant_config={given!r}, which has no settings of HQQ")
    if "weight_quant_params" in given:
        same = _scheme(given)
        return lambda name: same
    schemes = {kind: _scheme(options) for kind, options in given.items() if options is not None}

    def scheme_of(name: str) -> Scheme | None:
        kind = ".".join(part for part in name.split(".") if part not in ("model", "layers") and not part.isnumeric())
        return schemes.get(kind)

    return scheme_of


def _scheme(options: Settings) -> HQQ:
    weight: Settings = options.get("weight_quant_params") or {}
    for field in ("scale_quant_params", "zero_quant_params"):
        check_field(options, field, (None,))
    check_field(weight, "axis", (1,))
    check_field(weight, "view_as_float", (False, None))
    check_field(weight, "channel_wise", (True,), True)
    group = weight.get("group_size")
    if group is not None and (not isinstance(group, int) or group < 1):
        raise ValueError(f"quantization_config has group_size={group!r}, which is no number of weights")
    return HQQ(check_field(weight, "nbits", (1, 2, 4, 8)), group)
