"""Logprobs: for each place, the chosen token with its rank, and the likeliest tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from quire.messages.step import Logprobs


@dataclass
class TopLogprobs:
    """Logprobs at some places. The first column is the place's own token: the sampled token, or that of the prompt. The
    others are the likeliest tokens, best first, or those that the request named."""

    token_ids: Tensor  # int32 [places, 1 + count]
    logprobs: Tensor  # float32 [places, 1 + count]
    ranks: Tensor  # int32 [places]: rank of the place's own token; 1 is the likeliest

    @classmethod
    def of(cls, scores: Tensor, tokens: Tensor, count: int, named: Tensor | None = None) -> Self:
        """Return `count` logprobs at each place, in addition to that of the place's own token.

        scores: float32 [places, vocab]. tokens: int64 [places], the places' own tokens. named: int64 [places, at most
        count], token ids to report instead of the likeliest ones; -1 selects a likeliest one.
        """
        own = scores.gather(1, tokens[:, None])
        best, ids = scores.topk(count, dim=-1)
        if named is not None:
            named = torch.nn.functional.pad(named, (0, count - named.shape[1]), value=-1)
            ids = torch.where(named < 0, ids, named)
            best = scores.gather(1, ids)
        above = torch.gt(scores, own, out=torch.empty_like(scores))  # floats are summed three times as fast as booleans
        ranks = above.sum(-1) + 1
        return cls(torch.cat((tokens[:, None], ids), 1).int(), torch.cat((own, best), 1), ranks.int())

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        columns = zip(*(part.columns for part in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))

    def slice(self, start: int, stop: int, width: int) -> Self:
        """Return the first `width` columns of the places from `start` to `stop` - 1."""
        places = slice(start, stop)
        return type(self)(self.token_ids[places, :width], self.logprobs[places, :width], self.ranks[places])

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.token_ids, self.logprobs, self.ranks

    def pack(self) -> Logprobs:
        return Logprobs(self.token_ids.shape[1], *(column.numpy(force=True).tobytes() for column in self.columns))
