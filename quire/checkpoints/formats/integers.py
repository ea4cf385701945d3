"""Integer weights packed in 32-bit words, with a scale and a zero point per group: GPTQ, AWQ, compressed-tensors."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.checkpoints.formats.packing import integer_matrix, unpack, word_range
from quire.checkpoints.formats.scheme import Groups, Scheme, slot
from quire.layers.build import Builder
from quire.layers.linear import LinearShape
from quire.layers.specs import OutputPart
from quire.ops.reference.quantized import QuantizedMatrix

_FEWEST = 16  # inputs of a group in memory, if a rank has non-contiguous parts of groups


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

    def inputs_together(self, name: str) -> int:
        return max(self.group_size, 1)

    def load(self, builder: Builder, shape: LinearShape, part: OutputPart) -> Callable[[], QuantizedMatrix]:
        name = part.name
        bits = self.bits
        outputs = slice(part.start, part.stop)
        inputs = slice(shape.start, shape.stop)
        groups = Groups.of(shape, self.group_size)
        words, skip = word_range(shape.start, shape.stop, bits)
        zero_words, zero_skip = word_range(part.start, part.stop, bits)
        whole = (_words(shape.in_features, bits), part.rows)
        everything = slice(0, groups.count)
        packed = groups.count, _words(part.rows, bits)
        qweight = slot(builder, f"{name}.qweight", torch.int32, whole, words, outputs)
        qzeros = slot(builder, f"{name}.qzeros", torch.int32, packed, everything, zero_words)
        scales = slot(builder, f"{name}.scales", torch.float32, (groups.count, part.rows), everything, outputs)
        g_idx = slot(builder, f"{name}.g_idx", torch.int32, (shape.in_features,), inputs)

        def make() -> QuantizedMatrix:
            codes = unpack(qweight.t(), bits, shape.stop - shape.start, skip)
            zeros = unpack(qzeros, bits, part.stop - part.start, zero_skip).t()
            zeros = zeros + self.zero_shift & ((1 << bits) - 1)
            return _arranged(codes, bits, scales.t(), zeros, g_idx, groups)

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

    def inputs_together(self, name: str) -> int:
        return max(self.group_size, 1)

    def load(self, builder: Builder, shape: LinearShape, part: OutputPart) -> Callable[[], QuantizedMatrix]:
        name = part.name
        bits = self.bits
        outputs = slice(part.start, part.stop)
        inputs = slice(shape.start, shape.stop)
        groups = Groups.of(shape, self.group_size)
        picked = slice(0, groups.count) if self.act_order else groups.picked
        words, skip = word_range(shape.start, shape.stop, bits)
        whole = part.rows, _words(shape.in_features, bits)
        packed = slot(builder, f"{name}.weight_packed", torch.int32, whole, outputs, words)
        scales = slot(builder, f"{name}.weight_scale", torch.float32, (part.rows, groups.count), outputs, picked)
        zero_words, zero_skip = word_range(part.start, part.stop, bits)
        zero_point = g_idx = None
        if not self.symmetric:
            whole = _words(part.rows, bits), groups.count
            zero_point = slot(builder, f"{name}.weight_zero_point", torch.int32, whole, zero_words, picked)
        if self.act_order:
            g_idx = slot(builder, f"{name}.weight_g_idx", torch.int32, (shape.in_features,), inputs)

        def make() -> QuantizedMatrix:
            codes = unpack(packed, bits, shape.stop - shape.start, skip)
            zeros = None
            if zero_point is not None:
                zeros = unpack(zero_point.t(), bits, part.stop - part.start, zero_skip).t()
            if g_idx is not None:
                return _arranged(codes, bits, scales, zeros, g_idx, groups)
            zeros = None if zeros is None else groups.spread(zeros)
            return integer_matrix(codes, bits, groups.spread(scales), groups.size, zeros)

        return make


@dataclass(frozen=True)
class AWQ(Scheme):
    """AWQ (arXiv:2306.00978), as AutoAWQ writes it (version "gemm"), with four bits.

    qweight: int32 [in, out / 8], qzeros: int32 [groups, out / 8], both packed along the outputs, in the order that
    AutoAWQ's kernels need; scales: [groups, out].
    """

    group_size: int
    marker = "qweight"

    def inputs_together(self, name: str) -> int:
        return max(self.group_size, 1)

    def load(self, builder: Builder, shape: LinearShape, part: OutputPart) -> Callable[[], QuantizedMatrix]:
        name = part.name
        outputs = slice(part.start, part.stop)
        inputs = slice(shape.start, shape.stop)
        groups = Groups.of(shape, self.group_size)
        words, skip = word_range(part.start, part.stop, 4)
        packed = _words(part.rows, 4)
        qweight = slot(builder, f"{name}.qweight", torch.int32, (shape.in_features, packed), inputs, words)
        qzeros = slot(builder, f"{name}.qzeros", torch.int32, (groups.count, packed), groups.picked, words)
        scales = slot(builder, f"{name}.scales", torch.float32, (groups.count, part.rows), groups.picked, outputs)

        def in_order(words: Tensor) -> Tensor:
            fields = unpack(words, 4, words.shape[1] * 8).view(len(words), -1, 8)
            fields = fields[..., [0, 4, 1, 5, 2, 6, 3, 7]].flatten(1)
            return fields[:, skip : skip + part.stop - part.start].t()

        def make() -> QuantizedMatrix:
            spread = [groups.spread(values).contiguous() for values in (scales.t(), in_order(qzeros))]
            return integer_matrix(in_order(qweight), 4, spread[0], groups.size, spread[1])

        return make


def _words(fields: int, bits: int) -> int:
    return -(-fields * bits // 32)


def _arranged(
    codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None, g_idx: Tensor, groups: Groups
) -> QuantizedMatrix:
    """Build the matrix of a rank's inputs. g_idx: [in], the checkpoint's group of each input.

    codes: uint8 [out, in]; scales, zeros: [out, all groups of the checkpoint].
    """
    group_of = g_idx.long().cpu()
    if not group_of.any():  # the first group; or dummy weights, whose groups are neighbours
        group_of = (groups.index + groups.picked.start).repeat_interleave(groups.size)[: len(group_of)]
    index = group_of[:: groups.size]
    size = groups.size
    order = None
    num_inputs = None
    if not torch.equal(group_of, index.repeat_interleave(size)[: len(group_of)]):
        order, is_filler, group_of_column, size = _columns(group_of, groups.in_checkpoint)
        index = group_of_column[::size]
        order = order.to(codes.device)
        codes = codes[:, order]
        if is_filler.any():
            num_inputs = len(group_of)
            of_filler = group_of_column[is_filler].to(codes.device)
            zero = 1 << (bits - 1) if zeros is None else zeros[:, of_filler].to(torch.uint8)
            codes[:, is_filler.to(codes.device)] = zero
    index = index.to(codes.device)
    zeros = None if zeros is None else zeros[:, index]
    return integer_matrix(codes, bits, scales[:, index], size, zeros, order=order, num_inputs=num_inputs)


def _columns(group_of: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Sort columns by group, for a matrix whose groups have the same size, except for a shorter last one.

    group_of: the group of each input. size: inputs of a group in the checkpoint. Returns for each column its input,
    whether it is padding (zeros), and its group; and the size of a group in memory. With act-order, a rank may have any
    number of a group's inputs. Then groups in memory are small, and padding completes them: with groups of four inputs,
    the inputs a, b, c, d, e of a group become the columns a b c d, e 0 0 0.
    """
    by_group = group_of.argsort(stable=True)
    lengths = torch.bincount(group_of)
    present = lengths.nonzero()[:, 0]
    if not (lengths[present[:-1]] == size).all():
        size = math.gcd(size, _FEWEST)
    widths = -(-lengths // size) * size
    widths[present[-1]] = lengths[present[-1]]
    group_of_column = torch.arange(len(widths)).repeat_interleave(widths)
    first_inputs = lengths.cumsum(0) - lengths
    first_columns = widths.cumsum(0) - widths
    order = by_group[first_inputs[group_of_column]]  # for padding, an input of the same group
    ordered = group_of[by_group]
    columns = first_columns[ordered] + torch.arange(len(group_of)) - first_inputs[ordered]
    order[columns] = by_group
    is_filler = torch.ones(len(order), dtype=torch.bool)
    is_filler[columns] = False
    return order, is_filler, group_of_column, size
