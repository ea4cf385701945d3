"""Linear layers, split over a tensor group by rows (column parallel) or by columns (row parallel) of the weight.

The split follows Megatron-LM (arXiv:1909.08053): column parallel first, row parallel second, one sum per pair. A
layer's linear method decides how its weight is stored: dense, or in a quantized format.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.specs import OutputPart
from quire.ops.reference.quantized import RoundedRows

Rows = Tensor | RoundedRows  # the inputs of a product; only weights with `rounding` may get RoundedRows


@dataclass(frozen=True)
class LinearShape:
    """One rank's share of a linear layer: the outputs of `parts`, in order, computed from inputs [start, stop).

    in_features: inputs of the whole layer in the checkpoint. transposed: the checkpoint stores [in, out], as for GPT-2.
    """

    parts: tuple[OutputPart, ...]
    in_features: int
    start: int
    stop: int
    transposed: bool = False

    @property
    def out_features(self) -> int:
        return sum(p.stop - p.start for p in self.parts)


class LinearWeight(ABC):
    """The weight of one linear layer on one rank, in one format. Its constructor records the slots that fill it."""

    lasting: str

    @abstractmethod
    def __call__(self, x: Rows, bias: Tensor | None) -> Tensor:
        """x: [tokens, in] -> x W^T + bias: [tokens, out]"""

    def logits(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Like `__call__`, but in float32 if this does not slow down the kernel."""
        return self(x, bias)

    def rounding(self) -> torch.dtype | None:
        """Return the type of 8 bits to which the kernel rounds all inputs, which may then be passed as RoundedRows, or
        None. Known once the weight is loaded."""
        return None

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """Return the weights of the outputs `ids`, for a table that is both embedding and head: [len(ids), in]"""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the weight as [out, in] in the model's type, for layers that need it in this form."""


class LinearMethod(Protocol):
    """Decides how the weight of a linear layer is stored. has_tables: whether this includes an embedding that is also
    the head."""

    has_tables: bool

    def __call__(self, builder: Builder, shape: LinearShape) -> LinearWeight: ...

    def inputs_together(self, name: str) -> int:
        """Return the number of neighbouring inputs of the layer `name` that share a scale and should be on one rank, or
        1."""


class Quantizer(Protocol):
    """Makes a quantized weight."""

    @property
    def group(self) -> int:
        """The number of neighbouring inputs that share a scale."""

    def __call__(self, builder: Builder, weight: Callable[[], Tensor]) -> LinearWeight:
        """weight: returns the dense weight once it is loaded, and drops its own reference to it."""


class DenseWeight(LinearWeight):
    """A plain matrix in the model's type. It is packed after loading if the kernel has a packed form.

    dtype: the type in which a matrix that only `rows` reads is kept, if it is not the model's.
    """

    lasting = "weight"
    has_tables = False

    def __init__(
        self, builder: Builder, shape: LinearShape, pack: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        self.linear = builder.kernels.linear
        self.dtype = builder.dtype
        self.out_features = shape.out_features
        self.weight = builder.parameter(shape.out_features, shape.stop - shape.start, dtype=dtype)
        dense_slots(builder, shape, self.weight)
        builder.weights.append(self)
        self.is_packed = pack and hasattr(self.linear, "pack")
        if self.is_packed:
            builder.when_loaded(self._pack, makes_lasting=True)

    @staticmethod
    def inputs_together(name: str) -> int:
        return 1

    def _pack(self) -> None:
        self.weight = self.linear.pack(self.weight)  # type: ignore[attr-defined]

    def __call__(self, x: Rows, bias: Tensor | None) -> Tensor:
        out: Tensor = self.linear(x, self.weight, bias)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        if self.is_packed:
            return self.linear.rows(self.weight, ids)  # type: ignore[attr-defined, no-any-return]
        return torch.nn.functional.embedding(ids, self.weight).to(self.dtype)

    def dense(self) -> Tensor:
        return self.rows(torch.arange(self.out_features)) if self.is_packed else self.weight


def dense_slots(builder: Builder, shape: LinearShape, weight: Tensor) -> None:
    """Record which parts of the checkpoint's tensors fill `weight`, [out, in]: the dense weight of `shape`, or the
    dense form of another weight."""
    offset = 0
    for p in shape.parts:
        end = offset + p.stop - p.start
        whole = (p.rows, shape.in_features)
        pick = (slice(p.start, p.stop), slice(shape.start, shape.stop))
        if shape.transposed:
            whole = whole[::-1]
            pick = pick[::-1]
        builder.part(f"{p.name}.weight", weight[offset:end], whole, *pick, transposed=shape.transposed, is_raw=True)
        offset = end


def dense_weight(builder: Builder, shape: LinearShape) -> LinearWeight:
    """Return a weight that is dense in the checkpoint, quantized if the engine's options request it."""
    quantizer = builder.quantizer_of(shape.parts[0].name)
    if quantizer is None:
        return DenseWeight(builder, shape)
    weight = [builder.parameter(shape.out_features, shape.stop - shape.start)]
    dense_slots(builder, shape, weight[0])
    return quantizer(builder, weight.pop)


def make_weight(builder: Builder, shape: LinearShape) -> LinearWeight:
    """Return the weight in the checkpoint's format for this layer.

    Raises ValueError if fused parts have different formats.
    """
    methods = {builder.method_of(part.name) for part in shape.parts}
    if len(methods) > 1:
        raise ValueError(f"{', '.join(p.name for p in shape.parts)} are computed as one, but quantized differently")
    method = methods.pop()
    for part in shape.parts:
        builder.count(f"{part.name}.weight", part.rows * shape.in_features)
    return dense_weight(builder, shape) if method is DenseWeight else method(builder, shape)


class Adapters:
    """The low-rank adapters of a product. The base class has none; see LowRank in lora.py."""

    def add(self, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """Add the adapters' outputs to `out` in place: [rows, out]. x: [rows, in]. slots: the slot of each row's
        adapter, [rows], int64; -1 for none."""
        return out


def adapters_of(builder: Builder, shape: LinearShape, is_table: bool = False) -> Adapters:
    """Return the adapters of a product. is_table: whether it is that of a language-model head."""
    return Adapters() if builder.adapters is None else builder.adapters.product(builder, shape, is_table)


def inner_share(builder: Builder, size: int, reader: str) -> tuple[int, int]:
    """Return a rank's part [start, stop) of the inner elements of a feed-forward layer. Raises ValueError on all ranks
    if one of them would have none.

    reader: the layer that reads these elements. If it is quantized in groups of inputs, ranks get whole groups, unless
    there are fewer groups than ranks.
    """
    group = builder.tensor_group
    quantizer = builder.quantizer_of(reader)
    together = max(builder.method_of(reader).inputs_together(reader), 1 if quantizer is None else quantizer.group)
    if 1 < together <= size // group.size:
        groups = -(-size // together)
        first, last = (groups * rank // group.size for rank in (group.rank, group.rank + 1))
        return first * together, min(last * together, size)
    if -(-size // group.size) * (group.size - 1) >= size:
        raise ValueError(f"tensor_parallel_size={group.size} is too large: a feed-forward layer has {size} elements")
    return group.share(size)


class ColumnParallelLinear:
    """y = x W^T + b with the outputs split over ranks. Several checkpoint tensors may be fused into one product.

    Layers are called with the slot of each row's adapter, or None if no row has an adapter, see ForwardState.slots.
    """

    def __init__(
        self,
        builder: Builder,
        in_features: int,
        parts: Sequence[OutputPart],
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        shape = LinearShape(tuple(parts), in_features, 0, in_features, transposed)
        self.weight = make_weight(builder, shape)
        self.adapters = adapters_of(builder, shape)
        self.bias = builder.parameter(shape.out_features) if bias else None
        offset = 0
        for p in parts if bias else ():
            assert self.bias is not None
            end = offset + p.stop - p.start
            if p.has_bias:
                builder.part(f"{p.name}.bias", self.bias[offset:end], (p.rows,), slice(p.start, p.stop))
            else:
                self.bias[offset:end].zero_()
            offset = end

    def __call__(self, x: Rows, slots: Tensor | None = None) -> Tensor:
        """x: [tokens, in_features] -> [tokens, this rank's outputs]"""
        out = self.weight(x, self.bias)
        if slots is None:
            return out
        assert isinstance(x, Tensor)
        return self.adapters.add(out, x, slots)

    def rounding(self) -> torch.dtype | None:
        """See LinearWeight.rounding. Adapters need inputs as they are."""
        return self.weight.rounding() if type(self.adapters) is Adapters else None


class RowParallelLinear:
    """y = x W^T + b with the inputs split over ranks. Each rank computes one summand of the whole output, and the
    decoder layer adds these up (see ResidualStream). The summand of rank 0 includes the bias."""

    def __init__(
        self,
        builder: Builder,
        name: str,
        in_features: int,
        inputs: tuple[int, int],
        out_features: int,
        bias: bool = False,
        transposed: bool = False,
        is_copy: bool = False,
    ) -> None:
        """inputs: this rank's range, [start, stop). is_copy: whether another rank has the same inputs, so that this
        rank's summand is zero. Rank 0 is never a copy."""
        self.out_features = out_features
        self.is_copy = is_copy
        parts = (OutputPart(name, out_features, 0, out_features),)
        shape = LinearShape(parts, in_features, *inputs, transposed)
        self.weight = make_weight(builder, shape)
        self.adapters = adapters_of(builder, shape)
        self.bias = builder.whole(f"{name}.bias", out_features) if bias else None
        if bias and builder.tensor_group.rank > 0:
            builder.when_loaded(self._drop_bias)

    def _drop_bias(self) -> None:
        self.bias = None

    def __call__(self, x: Rows, slots: Tensor | None = None) -> Tensor:
        """x: [tokens, this rank's inputs] -> [tokens, out_features], this rank's summand"""
        if isinstance(x, RoundedRows):
            assert slots is None
            return self.weight(x, self.bias)
        if self.is_copy:
            return x.new_zeros(len(x), self.out_features)
        out = self.weight(x, self.bias)
        return out if slots is None else self.adapters.add(out, x, slots)

    def rounding(self) -> torch.dtype | None:
        """See ColumnParallelLinear.rounding."""
        return None if self.is_copy or type(self.adapters) is not Adapters else self.weight.rounding()


class ReplicatedLinear(ColumnParallelLinear):
    """y = x W^T + b, whole on every rank."""

    def __init__(self, builder: Builder, name: str, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(builder, in_features, [OutputPart(name, out_features, 0, out_features)], bias)
