"""The base of all formats: slots for the checkpoint's tensors, and their conversion to weights once they are filled."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.linear import LinearShape, LinearWeight, Rows
from quire.layers.specs import OutputPart
from quire.ops.reference.quantized import QuantizedMatrix, concatenate

Piece = QuantizedMatrix | Tensor  # some formats leave single tensors in floating point: [out, in]


class QuantizedWeight(LinearWeight):
    """A weight of one or more pieces, whose outputs are concatenated. The weight has as few pieces as possible, but
    fused tensors may have different schemes."""

    lasting = "pieces"

    def __init__(self, builder: Builder, parts: Sequence[Callable[[], Piece]]) -> None:
        """parts: functions that make the parts of the weight; called once the slots are filled."""
        self.kernels = builder.kernels
        self.dtype = builder.dtype
        self.pieces: list[Piece] = []
        builder.weights.append(self)
        # The functions own the checkpoint's tensors, which are freed here
        builder.when_loaded(partial(self._convert, parts), makes_lasting=True)

    def _convert(self, parts: Sequence[Callable[[], Piece]]) -> None:
        pieces = [part() for part in parts]
        matrices = [piece for piece in pieces if isinstance(piece, QuantizedMatrix)]
        self.pieces = [*concatenate(matrices)] if len(matrices) == len(pieces) else pieces
        pack = getattr(self.kernels.quantized_linear, "pack", None)
        if pack is not None:
            self.pieces = [pack(p) if isinstance(p, QuantizedMatrix) else p for p in self.pieces]

    def __call__(self, x: Rows, bias: Tensor | None) -> Tensor:
        if len(self.pieces) == 1:
            return self._multiply(x, self.pieces[0], bias)
        outputs = []
        start = 0
        for piece in self.pieces:
            stop = start + (len(piece) if isinstance(piece, Tensor) else piece.out_features)
            outputs.append(self._multiply(x, piece, bias if bias is None else bias[start:stop]))
            start = stop
        return torch.cat(outputs, dim=-1)

    def logits(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute in float32 on CPUs, whose kernels round inputs to 8 bits and accumulate in float32 for any dtype of
        x. Rounding logits to bfloat16 would create ties between tokens."""
        if x.is_cpu and self.is_packed:
            return self(x.float(), bias if bias is None else bias.float())
        return self(x, bias)

    @property
    def is_packed(self) -> bool:
        """Whether all pieces are in the layout of a kernel that multiplies codes."""
        return not any(isinstance(piece, QuantizedMatrix | Tensor) for piece in self.pieces)

    def rounding(self) -> torch.dtype | None:
        rounds = getattr(self.kernels.quantized_linear, "rounds", None)
        (piece, *others) = self.pieces
        if rounds is None or others or not isinstance(piece, QuantizedMatrix):
            return None
        code: torch.dtype | None = rounds(piece, self.dtype)
        return code

    def _multiply(self, x: Rows, piece: Piece, bias: Tensor | None) -> Tensor:
        kernel = self.kernels.linear if isinstance(piece, Tensor) else self.kernels.quantized_linear
        out: Tensor = kernel(x, piece, bias)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        (piece,) = self.pieces  # a table is one tensor
        if isinstance(piece, Tensor):
            return torch.nn.functional.embedding(ids, piece)
        return piece.dense_rows(ids, self.dtype)

    def dense(self) -> Tensor:
        unpacked = (p if isinstance(p, Tensor) else p.pick(torch.arange(p.out_features)) for p in self.pieces)
        pieces = (p.dequantize() if isinstance(p, QuantizedMatrix) else p for p in unpacked)
        return torch.cat([piece.to(self.dtype) for piece in pieces])


class Scheme(ABC):
    """One format with its options: the `LinearMethod` of the layers in that format. Equal options compare equal."""

    has_tables = False
    marker: str  # the name of a tensor that exists if, and only if, a layer is quantized

    def __call__(self, builder: Builder, shape: LinearShape) -> LinearWeight:
        return QuantizedWeight(builder, [self.load(builder, shape, part) for part in shape.parts])

    @abstractmethod
    def load(self, builder: Builder, shape: LinearShape, part: OutputPart) -> Callable[[], Piece]:
        """Declare the slots of one part. Returns a function that makes the part's piece from the filled slots."""

    @abstractmethod
    def inputs_together(self, name: str) -> int:
        """See LinearMethod."""


def slot(builder: Builder, name: str, dtype: torch.dtype, whole: tuple[int, ...], *pick: slice) -> Tensor:
    """Declare a parameter for the part [pick] of the checkpoint's tensor `name`, whose whole shape is `whole`."""
    target = builder.parameter(*(s.stop - s.start for s in pick), dtype=dtype)
    builder.quantized_part(name, target, whole, *pick)
    return target


@dataclass(frozen=True)
class Groups:
    """The groups of consecutive inputs of a layer on one rank.

    in_checkpoint: inputs of a group in the checkpoint. size: of a group in memory, which is smaller if the rank's
    inputs begin in the middle of a group. picked: the checkpoint's groups that contain inputs of the rank. count:
    number of groups in the checkpoint. index: for each group in memory, the picked group that contains it.

    Inputs 48 to 96 of 96 in groups of 32 -> size 16, picked 1 to 3, count 3, index [0, 1, 1]
    """

    in_checkpoint: int
    size: int
    picked: slice
    count: int
    index: Tensor

    @classmethod
    def of(cls, shape: LinearShape, size: int, divisible: bool = True) -> Self:
        """size: of a group in the checkpoint; -1 for all inputs. divisible: ranks may share a group of all inputs."""
        if size in (-1, 0) or (size >= shape.in_features and divisible):
            return cls(shape.in_features, shape.stop - shape.start, slice(0, 1), 1, torch.zeros(1, dtype=torch.int64))
        finer = math.gcd(size, shape.start)
        first = shape.start // size
        index = torch.arange(shape.start, shape.stop, finer) // size - first
        return cls(size, finer, slice(first, -(-shape.stop // size)), -(-shape.in_features // size), index)

    def spread(self, values: Tensor) -> Tensor:
        """[out, picked groups] -> [out, groups in memory]"""
        return values if len(self.index) == values.shape[1] else values[:, self.index.to(values.device)]
