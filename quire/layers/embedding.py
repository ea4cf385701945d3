"""Token embedding and language-model head, with the vocabulary split over the tensor group, and learned positions."""

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.linear import Adapters, DenseWeight, LinearShape, LinearWeight, adapters_of, dense_weight, make_weight
from quire.layers.lora import AdapterSlots, LowRank
from quire.layers.specs import OutputPart


class VocabParallelEmbedding:
    """A table with a vector for each token id. Each rank holds a share of the vocabulary."""

    def __init__(self, builder: Builder, name: str, vocab_size: int, hidden_size: int, is_head: bool) -> None:
        """is_head: the language-model head uses the same table, which is then stored in the form for matrix
        products."""
        self.group = builder.tensor_group
        self.start, self.stop = self.group.share(vocab_size)
        shape = LinearShape((OutputPart(name, vocab_size, self.start, self.stop),), hidden_size, 0, hidden_size)
        self.table: LinearWeight
        method = builder.method_of(name)
        if is_head:
            self.table = method(builder, shape) if method.has_tables else dense_weight(builder, shape)
        else:
            self.table = DenseWeight(builder, shape, pack=False, dtype=builder.kernels.target.narrow)
        self.adapters = Adapters()
        if builder.adapters is not None and builder.adapters.change([shape]):
            self.adapters = LowRankEmbedding(builder, builder.adapters, name, vocab_size, hidden_size)

    def __call__(self, ids: Tensor, slots: Tensor | None = None) -> Tensor:
        """ids: [tokens] -> [tokens, hidden]. slots: the slots of the tokens' adapters."""
        vectors = self._vectors(ids)
        return vectors if slots is None else self.adapters.add(vectors, ids, slots)

    def _vectors(self, ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return self.table.rows(ids)
        local = (ids >= self.start) & (ids < self.stop)
        vectors = self.table.rows((ids - self.start).masked_fill_(~local, 0))
        return self.group.all_reduce(vectors.masked_fill_(~local[:, None], 0))


class LowRankEmbedding(LowRank):
    """Adapters of an embedding, whose matrix A has a vector for each token id: a: [slots, vocab, rank]. Every rank
    holds the whole matrix."""

    def __init__(self, builder: Builder, slots: AdapterSlots, name: str, vocab_size: int, hidden_size: int) -> None:
        parts = (OutputPart(name, hidden_size, 0, hidden_size),)
        super().__init__(builder, slots, [LinearShape(parts, vocab_size, 0, vocab_size)], on_demand=True)
        identity = torch.eye(slots.max_rank, dtype=self.dtype, device=self.device)
        self.identity = identity.expand(slots.count, 1, -1, -1).contiguous()

    def shape_of_a(self, copies: int, rank: int) -> tuple[int, ...]:
        return copies, self.ins, rank

    def _fill_a(self, target: Tensor, index: int, a: Tensor) -> None:
        target.copy_(a.T)

    def add(self, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """x: the ids, [tokens]"""
        if self.is_allocated:
            given = self.a[slots.clamp(min=0), x]
            self.add_lora(out, given, self.identity, self.b, slots, self.ranks, self.bounds)
        return out


class LearnedPositions:
    """A vector for each position, added to the token embeddings. offset: the number of rows before position 0."""

    def __init__(self, builder: Builder, name: str, max_positions: int, hidden_size: int, offset: int) -> None:
        self.weight = builder.whole(f"{name}.weight", max_positions + offset, hidden_size)
        self.offset = offset

    def __call__(self, positions: Tensor) -> Tensor:
        """positions: [tokens] -> [tokens, hidden]"""
        return torch.nn.functional.embedding(positions + self.offset, self.weight)


class LMHead:
    """Computes logits over the vocabulary. If the model ties head and embedding, they share one table."""

    def __init__(
        self,
        builder: Builder,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tied: VocabParallelEmbedding | None,
        bias: bool = False,
        row_name: str | None = None,
    ) -> None:
        """row_name: the name of a bias that the checkpoint stores as a row, [1, vocab] (BART)."""
        self.group = builder.tensor_group
        self.vocab_size = vocab_size
        start, stop = self.group.share(vocab_size)
        shape = LinearShape((OutputPart(name, vocab_size, start, stop),), hidden_size, 0, hidden_size)
        self.weight = make_weight(builder, shape) if tied is None else tied.table
        self.adapters = adapters_of(builder, shape, is_table=True)
        # The adapters' summand is in the model's type.
        self.product = self.weight if isinstance(self.adapters, LowRank) else self.weight.logits
        self.bias = builder.parameter(stop - start) if bias else None
        if self.bias is not None and row_name is not None:
            builder.part(row_name, self.bias[None], (1, vocab_size), slice(None), slice(start, stop))
        elif self.bias is not None:
            builder.part(f"{name}.bias", self.bias, (vocab_size,), slice(start, stop))

    def __call__(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        """hidden: [rows, hidden] -> [rows, vocab], on every rank. slots: the slots of the rows' adapters."""
        logits = self.product(hidden, self.bias)
        if slots is not None:
            logits = self.adapters.add(logits, hidden, slots)
        return self.group.all_gather(logits, self.vocab_size)
