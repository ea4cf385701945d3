"""The likeliest tokens at each place, and the rank of the one that is there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from quire.messages.step import Logprobs


@dataclass
class TopLogprobs:
    """At each place: the token that is there, then the likeliest, best first, or those that the request named."""

    token_ids: Tensor  # int32 [places, 1 + count]
    logprobs: Tensor  # float32 [places, 1 + count]
    ranks: Tensor  # int32 [places]: of the token that is there, 1 for the likeliest

    @classmethod
    def of(cls, scores: Tensor, tokens: Tensor, count: int, named: Tensor | None = None) -> Self:
        """scores: [places, vocab], float32; tokens: [places], int64, what is there; named: [places, at most count],
        int64, token ids that are wanted instead of the likeliest, -1 for those"""
        own = scores.gather(1, tokens[:, None])
        best, ids = scores.topk(count, dim=-1)
        if named is not None:
            named = torch.nn.functional.pad(named, (0, count - named.shape[1]), value=-1)
            ids = torch.where(named < 0, ids, named)
            best = scores.gather(1, ids)
        above = torch.gt(scores, own, out=torch.empty_like(scores))  # as floats, which are added up three times as fast
        ranks = above.sum(-1) + 1
        return cls(torch.cat((tokens[:, None], ids), 1).int(), torch.cat((own, best), 1), ranks.int())

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        columns = zip(*(part.columns for part in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))

    def slice(self, start: int, stop: int, width: int) -> Self:
        """The first `width` tokens of some places."""
        places = slice(start, stop)
        return type(self)(self.token_ids[places, :width], self.logprobs[places, :width], self.ranks[places])

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.token_ids, self.logprobs, self.ranks

    def pack(self) -> Logprobs:
        return Logprobs(self.token_ids.shape[1], *(column.numpy(force=True).tobytes() for column in self.columns))
