"""Token embedding and language-model head, with the vocabulary split over the tensor group."""

import torch
from torch import Tensor

from quire.layers.build import Builder


class VocabParallelEmbedding:
    """Rows of the table for token ids; each rank holds a share of the vocabulary."""

    def __init__(self, builder: Builder, name: str, vocab_size: int, hidden_size: int) -> None:
        self.group = builder.tensor_group
        self.start, self.stop = self.group.share(vocab_size)
        self.weight = builder.parameter(self.stop - self.start, hidden_size)
        builder.part(name, self.weight, (vocab_size, hidden_size), 0, self.start, self.stop)

    def __call__(self, ids: Tensor) -> Tensor:
        """ids: [tokens] -> [tokens, hidden]"""
        if self.group.size == 1:
            return torch.nn.functional.embedding(ids, self.weight)
        mine = (ids >= self.start) & (ids < self.stop)
        rows = torch.nn.functional.embedding((ids - self.start).masked_fill_(~mine, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill_(~mine[:, None], 0))


class LMHead:
    """Logits over the vocabulary; the table is the embedding's own where the model ties them."""

    def __init__(
        self, builder: Builder, name: str, vocab_size: int, hidden_size: int, tied: VocabParallelEmbedding | None
    ) -> None:
        self.linear = builder.kernels.linear
        builder.linears.append(self)
        self.group = builder.tensor_group
        self.vocab_size = vocab_size
        if tied is None:
            start, stop = self.group.share(vocab_size)
            self.weight = builder.parameter(stop - start, hidden_size)
            builder.part(name, self.weight, (vocab_size, hidden_size), 0, start, stop)
        else:
            self.weight = tied.weight

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] -> [rows, vocab], on every rank"""
        return self.group.all_gather(self.linear(hidden, self.weight, None), self.vocab_size)
