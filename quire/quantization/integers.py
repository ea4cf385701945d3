"""Weights of a few bits, packed in 32-bit words, with a scale and a zero point per group: GPTQ, AWQ,
compressed-tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.linear import LinearShape
from quire.layers.specs import OutputPart
from quire.ops.reference.quantized import QuantizedMatrix
from quire.quantization.packing import integer_matrix, unpack, word_range
from quire.quantization.scheme import Scheme, groups, slot


@dataclass(frozen=True)
class GPTQ(Scheme):
    """GPTQ (arXiv:2210.17323), as AutoGPTQ, GPTQModel and AutoRound write it.

    qweight: int32 [in * bits / 32, out], packed along the inputs; qzeros: int32 [groups, out * bits / 32], packed along
    the outputs; scales: [groups, out]; g_idx: [in], the group of each input. zero_shift: to be added to the stored zero
    points; 1 in the first version of the format, 0 in the second.
    """

    bits: int
    group_size: int
    zero_shift: int
    marker = "qweight"

    def load(self, builder: Builder, shape: LinearShape, part: OutputPart) -> Callable[[], QuantizedMatrix]:
        name, bits = part.name, self.bits
        outputs, inputs = slice(part.start, part.stop), slice(shape.start, shape.stop)
        group, picked, count = groups(shape, part, self.group_size)
        words, skip = word_range(shape.start, shape.stop, bits)
        zero_words, zero_skip = word_range(part.start, part.stop, bits)
        whole = _words(shape.in_features, bits), part.rows
        qweight = slot(builder, f"{name}.qweight", torch.int32, whole, words, outputs)
        qzeros = slot(builder, f"{name}.qzeros", torch.int32, (count, _words(part.rows, bits)), picked, zero_words)
        scales = slot(builder, f"{name}.scales", torch.float32, (count, part.rows), picked, outputs)
        g_idx = slot(builder, f"{name}.g_idx", torch.int32, (shape.in_features,), inputs)

        def make() -> QuantizedMatrix:
            codes = unpack(qweight.t(), bits, shape.stop - shape.start, skip)
            zeros = unpack(qzeros, bits, part.stop - part.start, zero_skip).t()
            zeros = zeros + self.zero_shift & ((1 << bits) - 1)
            order = _input_order(name, g_idx, picked.start, group)
            codes = codes if order is None else codes[:, order]
            return integer_matrix(codes, bits, scales.t().contiguous(), group, zeros, order=order)

        return make


@dataclass(frozen=True)
class PackedIntegers(Scheme):
    """compressed-tensors' "pack-quantized".

    weight_packed: int32 [out, in * bits / 32]; weight_scale: [out, groups]; if not symmetric, weight_zero_point: int32
    [out * bits / 32, groups], packed along the outputs; with act-order, weight_g_idx: [in].
    """

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool
    marker = "weight_packed"

    def load(self, builder: Builder, shape: LinearShape, part: OutputPart) -> Callable[[], QuantizedMatrix]:
        name, bits, outputs, inputs = part.name, self.bits, slice(part.start, part.stop), slice(shape.start, shape.stop)
        group, picked, count = groups(shape, part, self.group_size)
        words, skip = word_range(shape.start, shape.stop, bits)
        whole = part.rows, _words(shape.in_features, bits)
        packed = slot(builder, f"{name}.weight_packed", torch.int32, whole, outputs, words)
        scales = slot(builder, f"{name}.weight_scale", torch.float32, (part.rows, count), outputs, picked)
        zero_words, zero_skip = word_range(part.start, part.stop, bits)
        zero_point = g_idx = None
        if not self.symmetric:
            whole = _words(part.rows, bits), count
            zero_point = slot(builder, f"{name}.weight_zero_point", torch.int32, whole, zero_words, picked)
        if self.act_order:
            g_idx = slot(builder, f"{name}.weight_g_idx", torch.int32, (shape.in_features,), inputs)

        def make() -> QuantizedMatrix:
            codes, zeros = unpack(packed, bits, shape.stop - shape.start, skip), None
            if zero_point is not None:
                zeros = unpack(zero_point.t(), bits, part.stop - part.start, zero_skip).t()
            order = None if g_idx is None else _input_order(name, g_idx, picked.start, group)
            codes = codes if order is None else codes[:, order]
            return integer_matrix(codes, bits, scales, group, zeros, order=order)

        return make


@dataclass(frozen=True)
class AWQ(Scheme):
    """AWQ (arXiv:2306.00978), as AutoAWQ writes it (version "gemm"), with four bits.

    qweight: int32 [in, out / 8], qzeros: int32 [groups, out / 8], both packed along the outputs, in the order that
    AutoAWQ's kernels need; scales: [groups, out].
    """

    group_size: int
    marker = "qweight"

    def load(self, builder: Builder, shape: LinearShape, part: OutputPart) -> Callable[[], QuantizedMatrix]:
        name, outputs, inputs = part.name, slice(part.start, part.stop), slice(shape.start, shape.stop)
        group, picked, count = groups(shape, part, self.group_size)
        words, skip = word_range(part.start, part.stop, 4)
        packed = _words(part.rows, 4)
        qweight = slot(builder, f"{name}.qweight", torch.int32, (shape.in_features, packed), inputs, words)
        qzeros = slot(builder, f"{name}.qzeros", torch.int32, (count, packed), picked, words)
        scales = slot(builder, f"{name}.scales", torch.float32, (count, part.rows), picked, outputs)

        def in_order(words: Tensor) -> Tensor:
            fields = unpack(words, 4, words.shape[1] * 8).view(len(words), -1, 8)
            fields = fields[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)
            return fields[:, skip : skip + part.stop - part.start].t()

        def make() -> QuantizedMatrix:
            return integer_matrix(in_order(qweight), 4, scales.t().contiguous(), group, in_order(qzeros))

        return make


def _words(fields: int, bits: int) -> int:
    return -(-fields * bits // 32)


def _input_order(name: str, g_idx: Tensor, first: int, group: int) -> Tensor | None:
    """The indices that sort the inputs by group; None if they are sorted. first: the rank's first group.

    Raises ValueError if the groups do not all have the same size.
    """
    expected = torch.arange(len(g_idx)) // group + first
    if torch.equal(g_idx.long(), expected) or not g_idx.any():  # only zeros: a single group, or dummy weights
        return None
    order = g_idx.argsort(stable=True)
    if not torch.equal(g_idx[order].long(), expected):
        raise ValueError(f"{name}: its inputs do not fall into groups of {group}; a checkpoint with act-order "
                         "(desc_act) can be loaded with tensor_parallel_size=1 only")  # fmt: skip
    return order
