"""The embeddings of a step's pictures, which replace those of token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepMedia:
    """tokens: [n], int64, the tokens of the step whose embeddings are replaced. embeds: [n, hidden]. levels: by
    layer, summands of their residual stream after it, [n, hidden] each (DeepStack, arXiv:2406.04334).
    spans: ranges [start, stop) of the step's tokens that see each other in both directions."""

    tokens: Tensor
    embeds: Tensor
    levels: Mapping[int, Tensor] = field(default_factory=dict)
    spans: Sequence[tuple[int, int]] = ()

    @property
    def reaches_layers(self) -> bool:
        """Whether layers read these data. Such steps are not replayed."""
        return bool(self.levels or self.spans)

    def fill(self, x: Tensor) -> Tensor:
        """Replace embeddings. x: [tokens, hidden], the embeddings of the step's token ids, which are overwritten."""
        return x.index_copy_(0, self.tokens, self.embeds)

    def add_level(self, layer: int, x: Tensor, wanted: Tensor | None = None) -> None:
        """Add the layer's level to x: [tokens or len(wanted), hidden], the result of the layer's last branch."""
        level = self.levels.get(layer)
        if level is None:
            return
        if wanted is None:
            x.index_add_(0, self.tokens, level)
        else:
            rows, own = (wanted[:, None] == self.tokens).nonzero(as_tuple=True)
            x.index_add_(0, rows, level[own])

    def look_ahead(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, soft_cap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend from each token of a span to the later tokens of its span, as a partial result for the op
        merge_partials.

        q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim] -> out: [tokens, heads, dim], lse: [tokens, heads]
        """
        out = torch.zeros_like(q)
        lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
        queries_each = q.shape[1] // k.shape[1]
        for start, stop in self.spans:
            keys, values = (x[start:stop].repeat_interleave(queries_each, 1).transpose(0, 1).float() for x in (k, v))
            scores = q[start:stop].transpose(0, 1).float() @ keys.transpose(1, 2) * scale  # [heads, n, n]
            if soft_cap is not None:
                scores = torch.tanh(scores / soft_cap) * soft_cap
            ahead = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(~ahead, float("-inf"))
            lse[start:stop] = scores.logsumexp(-1).T
            out[start : stop - 1] = (scores[:, :-1].softmax(-1) @ values).transpose(0, 1).to(q.dtype)
        return out, lse
