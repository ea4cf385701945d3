"""Token embedding and language-model head, with the vocabulary split over the tensor group; learned positions."""

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.linear import DenseWeight, LinearShape, OutputPart, make_weight


class VocabParallelEmbedding:
    """Rows of the table for token ids; each rank holds a share of the vocabulary."""

    def __init__(self, builder: Builder, name: str, vocab_size: int, hidden_size: int) -> None:
        self.group = builder.tensor_group
        self.start, self.stop = self.group.share(vocab_size)
        self.weight = builder.parameter(self.stop - self.start, hidden_size)
        builder.part(f"{name}.weight", self.weight, (vocab_size, hidden_size), slice(self.start, self.stop))

    def __call__(self, ids: Tensor) -> Tensor:
        """ids: [tokens] -> [tokens, hidden]"""
        if self.group.size == 1:
            return torch.nn.functional.embedding(ids, self.weight)
        mine = (ids >= self.start) & (ids < self.stop)
        rows = torch.nn.functional.embedding((ids - self.start).masked_fill_(~mine, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill_(~mine[:, None], 0))


class LearnedPositions:
    """A vector for each position, added to the tokens' embeddings. offset: rows of the table before position 0's."""

    def __init__(self, builder: Builder, name: str, max_positions: int, hidden_size: int, offset: int) -> None:
        self.weight = builder.whole(f"{name}.weight", max_positions + offset, hidden_size)
        self.offset = offset

    def __call__(self, positions: Tensor) -> Tensor:
        """positions: [tokens] -> [tokens, hidden]"""
        return torch.nn.functional.embedding(positions + self.offset, self.weight)


class LMHead:
    """Logits over the vocabulary; the table is the embedding's own where the model ties them."""

    def __init__(
        self, builder: Builder, name: str, vocab_size: int, hidden_size: int, tied: VocabParallelEmbedding | None,
        bias: bool = False,
    ) -> None:  # fmt: skip
        self.group, self.vocab_size = builder.tensor_group, vocab_size
        start, stop = self.group.share(vocab_size)
        shape = LinearShape((OutputPart(name, vocab_size, start, stop),), hidden_size, 0, hidden_size)
        self.weight = make_weight(builder, shape) if tied is None else DenseWeight(builder, shape, tied.weight)
        self.bias = builder.parameter(stop - start) if bias else None
        if self.bias is not None:
            builder.part(f"{name}.bias", self.bias, (vocab_size,), slice(start, stop))

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] -> [rows, vocab], on every rank"""
        return self.group.all_gather(self.weight(hidden, self.bias), self.vocab_size)
