"""Quantizes dense weights while loading them: --quantization int8, int4 and fp8."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.checkpoints.formats.scheme import Piece, QuantizedWeight
from quire.layers.build import Builder
from quire.layers.linear import LinearWeight, Quantizer
from quire.ops.reference.quantized import QuantizedMatrix

AT_LOAD = ("int8", "int4", "fp8")  # values of --quantization
_WHOLE_ROW = 2**30  # a group size larger than any number of inputs, so that each output has one scale
# Not quantized: a router, a gate and an indexer's weights are small, but decide which experts and tokens are used; kv_b
# is absorbed into other weights.
_NOT_QUANTIZED = ("router", "shared_expert_gate", "kv_b", "index_weights")
_TABLES = ("lm_head", "embedding")  # at least 8 bits, since their errors directly change the logits


@dataclass(frozen=True)
class AtLoad:
    """A `Quantizer`. bits: bits per weight. group: number of inputs that share a scale."""

    bits: int
    group: int

    def __call__(self, builder: Builder, weight: Callable[[], Tensor]) -> LinearWeight:
        def make() -> Piece:
            piece: Piece = builder.kernels.quantize(weight(), self.bits, self.group)
            return piece

        return QuantizedWeight(builder, [make])


class Float8AtLoad:
    """A `Quantizer`: float8 (e4m3) with one scale for each output."""

    group = _WHOLE_ROW

    def __call__(self, builder: Builder, weight: Callable[[], Tensor]) -> LinearWeight:
        return QuantizedWeight(builder, [lambda: to_float8(weight())])


def to_float8(weight: Tensor) -> QuantizedMatrix:
    """weight: [out, in]"""
    rows = weight.float()
    scales = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return QuantizedMatrix((rows / scales).to(torch.float8_e4m3fn), scales, weight.shape[1], weight.shape[1])


def quantizer_of(option: str | None, names: Mapping[str, str | None]) -> Callable[[str], Quantizer | None]:
    """Return a function from a layer's name to its quantizer, according to --quantization.

    names: the names of the model's layers, by role.
    """
    if option not in AT_LOAD:
        return lambda name: None
    table: Quantizer = AtLoad(8, _WHOLE_ROW)
    layer: Quantizer = Float8AtLoad() if option == "fp8" else table if option == "int8" else AtLoad(4, 128)
    not_quantized = _pattern(names, _NOT_QUANTIZED)
    tables = _pattern(names, _TABLES)

    def quantizer(name: str) -> Quantizer | None:
        if not_quantized.fullmatch(name):
            return None
        return table if tables.fullmatch(name) else layer

    return quantizer


def _pattern(names: Mapping[str, str | None], roles: tuple[str, ...]) -> re.Pattern[str]:
    chosen = [re.escape(name).replace(r"\{i\}", r"\d+") for role in roles if (name := names.get(role)) is not None]
    return re.compile("|".join(chosen) or r"(?!)")
