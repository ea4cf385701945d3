"""Low-rank adapters (LoRA): the matrices of several adapters for each product, and the adapter that each token uses.

A model has a fixed number of slots for adapters. A fused product of several checkpoint tensors (q, k and v) has a
matrix A for each of these parts:

    out += B[slot] A[slot] x        a: [slots, parts, rank, in]    b: [slots, rank, outs], with the adapter's scale
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.linear import Adapters, LinearShape
from quire.observability.logging import logger
from quire.ops.memory import zeros

Matrices = Mapping[str, tuple[Tensor, Tensor]]  # module -> (A: [rank, in], B: [out, rank]), float32, the scale in B

_PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")


class Piece(NamedTuple):
    """One adapter's matrices for a product, of one or more experts. a: [experts, parts, rank, in], b: [experts, rank,
    outs]."""

    a: Tensor
    b: Tensor


class AdapterSlots:
    """The adapter slots of a model, and all products that adapters can change."""

    def __init__(
        self, count: int, max_rank: int, targets: Sequence[str] = (), replica: int = 0, replicas: int = 1
    ) -> None:
        """targets: the name endings of the modules that adapters can change; empty for all modules. replica, replicas:
        the number of this replica among those that share experts. Their experts have slots for the adapters of all
        replicas ("shared slots")."""
        self.count = count
        self.replica = replica
        self.replicas = replicas
        self.max_rank = max_rank
        self._targets = tuple(targets)
        self.products: list[LowRank] = []
        self._elsewhere = set[str]()  # modules of other pipeline stages, which are checked there

    def note_elsewhere(self, tensors: Iterable[str]) -> None:
        """Accept adapters for modules that only other ranks have. tensors: the names of their tensors."""
        self._elsewhere |= {name.rpartition(".")[0] for name in tensors}

    def product(self, builder: Builder, shape: LinearShape, is_table: bool = False) -> Adapters:
        """Return the adapters of a product, or no adapters if they cannot change it. is_table: whether it is that of a
        language-model head."""
        return LowRank(builder, self, [shape], on_demand=is_table) if self.change([shape]) else Adapters()

    def change(self, shapes: Sequence[LinearShape]) -> bool:
        """Return whether adapters can change any tensor of a product, or of the products of several experts."""
        return any(self._is_target(name) for shape in shapes for name in _names(shape))

    def _is_target(self, module: str) -> bool:
        return not self._targets or any(f".{module}".endswith(f".{target}") for target in self._targets)

    def pieces(self, matrices: Matrices, only_shared: bool = False) -> list[Piece | None]:
        """Return an adapter's matrices for each product. only_shared: only for those with shared slots. Raises
        ValueError for unknown modules and wrong shapes."""
        if left_out := [module for module in matrices if not self._is_target(module)]:
            names = ", ".join(sorted({module.rpartition(".")[2] for module in left_out}))
            logger.warning("An adapter is used without %s, which lora_target_modules does not name", names)
            matrices = {module: both for module, both in matrices.items() if module not in left_out}
        shapes = [shape for product in self.products for shape in product.shapes]
        sizes = {part.name: (part.rows, shape.in_features) for shape in shapes for part in shape.parts}
        matrices = {_known(module, sizes): both for module, both in matrices.items()}
        others = self._elsewhere
        matrices = {m: both for m, both in matrices.items() if m in sizes or _known(m, others) not in others}
        if unknown := sorted(matrices.keys() - sizes.keys()):
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise ValueError(f"the model has no linear layer for {', '.join(unknown[:3])}{more}")
        for name, (a, b) in matrices.items():
            outs, ins = sizes[name]
            if a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1] or (len(b), a.shape[1]) != (outs, ins):
                raise ValueError(
                    f"{name} has matrices A {list(a.shape)} and B {list(b.shape)}, but the layer has "
                    f"{ins} inputs and {outs} outputs"
                )
            if len(a) > self.max_rank:
                raise ValueError(f"{name} has rank {len(a)}; max_lora_rank is {self.max_rank}")
        return [p.piece(matrices) if p.is_shared or not only_shared else None for p in self.products]

    def write(self, slot: int, pieces: list[Piece | None]) -> None:
        """Put an adapter into a slot of this replica."""
        for product, piece in zip(self.products, pieces, strict=True):
            product.write(product.first_slot + slot, piece)

    def write_shared(self, replica: int, slot: int, pieces: list[Piece | None]) -> None:
        """Put an adapter into a slot of another replica, for the experts that this rank has."""
        for product, piece in zip(self.products, pieces, strict=True):
            if product.is_shared:
                product.write(replica * self.count + slot, piece)


def slots_of_copies(slots: Tensor, copies: int, rows: Tensor, of_rows: Tensor) -> Tensor:
    """Return the op's slots for rows that belong to one of several experts, or to one of several heads.

    slots: the slot of each token's adapter. rows: the token of each row. of_rows: the expert of each row, or `copies`
    if it has none.
    """
    chosen = slots[rows]
    return torch.where((chosen < 0) | (of_rows >= copies), -1, chosen * copies + of_rows)


def _known(module: str, names: Container[str]) -> str:
    """Return the model's name for a module that may be part of a larger model, or the given name if there is none."""
    bare = [module.removeprefix(prefix) for prefix in _PREFIXES if module.startswith(prefix)]
    return next((name for b in bare for name in (b, f"model.{b}") if name in names), module)


class LowRank(Adapters):
    """The adapters' part of one product, or of the products of several experts, in all slots.

    Each expert has its own slots: expert e of slot s is in the op's slot s * len(shapes) + e.
    """

    def __init__(
        self,
        builder: Builder,
        slots: AdapterSlots,
        shapes: Sequence[LinearShape],
        on_demand: bool = False,
        is_shared: bool = False,
    ) -> None:
        """shapes: the shape of the product, or one shape for each expert. on_demand: memory is allocated when the first
        adapter needs it. CUDA graphs and recorded steps cannot contain such products. is_shared: whether tokens of
        other replicas use it, so that it has slots for theirs, too."""
        self.slots = slots
        self.is_shared = is_shared
        self.first_slot = slots.replica * slots.count if is_shared else 0
        self.num_slots = slots.replicas * slots.count if is_shared else slots.count
        self.shapes = shapes
        self.dtype = builder.dtype
        self.device = builder.device
        self.add_lora: Callable[..., Tensor] = builder.kernels.add_lora
        self.copies = len(shapes)
        self.num_parts, self.ends = len(_names(shapes[0])), [0, *accumulate(_widths(shapes[0]))]
        self.ins = shapes[0].stop - shapes[0].start
        self._reserve(on_demand)

    def _reserve(self, on_demand: bool) -> None:
        self.bounds = torch.tensor(self.ends, device=self.device)
        self.ranks = torch.zeros(self.num_slots * self.copies, dtype=torch.int64, device=self.device)
        self.a = self.b = torch.empty(0)
        self.is_allocated = False
        if not on_demand:
            self._allocate()
        self.slots.products.append(self)

    def _allocate(self) -> None:
        copies = self.num_slots * self.copies
        rank = self.slots.max_rank
        self.is_allocated = True
        self.a = zeros(*self.shape_of_a(copies, rank), dtype=self.dtype, device=self.device)
        self.b = zeros(copies, rank, self.ends[-1], dtype=self.dtype, device=self.device)

    def shape_of_a(self, copies: int, rank: int) -> tuple[int, ...]:
        return copies, self.num_parts, rank, self.ins

    def add(self, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """slots: the op's slots, see `slots_of_copies`."""
        if self.is_allocated:
            self.add_lora(out, x, self.a, self.b, slots, self.ranks, self.bounds)
        return out

    def piece(self, matrices: Matrices) -> Piece | None:
        """Return this rank's part of an adapter, in the model's type."""
        given = [matrices[name] for shape in self.shapes for name in _names(shape) if name in matrices]
        if not given:
            return None
        piece = self._blank(max(len(a) for a, _ in given))
        for copy, shape in enumerate(self.shapes):
            for index, name in enumerate(_names(shape)):
                if name in matrices:
                    a, b = matrices[name]
                    rows = torch.cat([b[part.start : part.stop] for part in shape.parts if part.name == name])
                    piece.b[copy, : len(a), self.ends[index] : self.ends[index + 1]] = rows.T
                    self._fill_a(piece.a[copy], index, a[:, shape.start : shape.stop])
        return piece

    def _blank(self, rank: int) -> Piece:
        pinned = self.device.type == "cuda"
        a = self.shape_of_a(self.copies, rank)
        b = (self.copies, rank, self.ends[-1])
        return Piece(*(torch.zeros(*shape, dtype=self.dtype, pin_memory=pinned) for shape in (a, b)))

    def _fill_a(self, target: Tensor, index: int, a: Tensor) -> None:
        target[index, : len(a)] = a

    def write(self, slot: int, piece: Piece | None) -> None:
        copies = slice(slot * self.copies, (slot + 1) * self.copies)
        if piece is None:
            self.ranks[copies].fill_(0)
            return
        if not self.is_allocated:
            self._allocate()
        rank = piece.b.shape[1]
        self.a[copies, :, :rank].copy_(piece.a, non_blocking=True)
        self.b[copies, :rank].copy_(piece.b, non_blocking=True)
        self.ranks[copies].fill_(rank)


def _names(shape: LinearShape) -> list[str]:
    """Return the names of the checkpoint tensors in a product, each once, even if it has several parts."""
    return list(dict.fromkeys(part.name for part in shape.parts))


def _widths(shape: LinearShape) -> list[int]:
    return [sum(p.stop - p.start for p in shape.parts if p.name == name) for name in _names(shape)]
