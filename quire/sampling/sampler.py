"""From logits to token ids, for all rows of a step at once. Rows that ask for nothing pay nothing."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.ops import Kernels


@dataclass
class SamplingBatch:
    """The parameters of the rows that sample, as tensors [rows]; None where no row asks for it.

    masked: pairs of index tensors (rows, token ids) that must not be sampled now.
    """

    temperature: Tensor | None  # None: every row is greedy
    seeds: Tensor | None = None  # int64
    positions: Tensor | None = None  # int64: which output token this is
    top_k: Tensor | None = None  # int64, vocab_size where a row has none
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    masked: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Sampler:
    """Greedy, or temperature then min-p, top-k and top-p, then a draw that depends on (seed, position) alone."""

    def __init__(self, kernels: Kernels) -> None:
        self.sample_gumbel = kernels.sample_gumbel

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """logits: [rows, vocab], any float type -> token ids [rows], int64"""
        for rows, tokens in batch.masked:
            logits[rows, tokens] = float("-inf")
        if batch.temperature is None:
            return logits.argmax(-1)
        assert batch.seeds is not None
        assert batch.positions is not None
        random = (batch.temperature > 0).nonzero().squeeze(1)
        everyone = len(random) == len(logits)
        scaled = (logits if everyone else logits[random]).float() / batch.temperature[random][:, None]
        if batch.min_p is not None:
            floor = scaled.amax(-1, keepdim=True) + batch.min_p[random][:, None].log()
            scaled.masked_fill_(scaled < floor, float("-inf"))
        if batch.top_k is not None or batch.top_p is not None:
            _mask_top_k_top_p(
                scaled,
                None if batch.top_k is None else batch.top_k[random],
                None if batch.top_p is None else batch.top_p[random],
            )
        drawn: Tensor = self.sample_gumbel(scaled, batch.seeds[random], batch.positions[random])
        if everyone:
            return drawn
        tokens = logits.argmax(-1)
        tokens[random] = drawn
        return tokens


def _mask_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> None:
    """Keep the top_k largest; of those, the fewest whose probabilities reach top_p. In place. logits: [rows, vocab].

    Only rows that truncate are sorted. Ties are resolved by token id, so that exactly k tokens stay.
    """
    vocab = logits.shape[1]
    asks = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    if top_k is not None:
        asks |= top_k < vocab
    if top_p is not None:
        asks |= top_p < 1
    rows = asks.nonzero().squeeze(1)
    values, order = logits[rows].sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(vocab, device=logits.device)
        values.masked_fill_(rank[None, :] >= top_k[rows][:, None], float("-inf"))
    if top_p is not None:
        probabilities = values.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # the mass of the larger ones
        drop = before >= top_p[rows][:, None]
        drop[:, 0] = False  # the largest always stays
        values.masked_fill_(drop, float("-inf"))
    logits[rows] = torch.empty_like(values).scatter_(-1, order, values)
