"""Attention to blocks of the text that an indexer selects for each KV head (MiniMax-M3).

The indexer has one key for each token, and a query for each KV head. A block's score is the largest product of the
query with the keys of its tokens; the last blocks are always selected. Queries, keys and values of each KV head attend
within the blocks that the head has selected. All of this is computed with PyTorch operations.
"""

import torch
from torch import Tensor

from quire.attention.rows import Rows, StepTokens
from quire.layers.attention import CachedAttention
from quire.layers.attention_spec import BlockAttentionSpec, HeadShare, LayerPlace
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState, pick
from quire.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from quire.layers.norm import make_norm
from quire.layers.specs import OutputPart

_MOST_SCORES = 1 << 24  # that are computed at once


class BlockAttention(CachedAttention):
    """The attention of one layer. names: the names of q, k, v, o, q_norm, k_norm, and of index_q, index_k, index_q_norm
    and index_k_norm."""

    def __init__(self, builder: Builder, spec: BlockAttentionSpec, names: dict[str, str], place: LayerPlace) -> None:
        self.spec = spec
        self.place = place
        self.kernels = builder.kernels
        attention = spec.attention
        share = HeadShare.of(attention, builder.tensor_group)
        dim = attention.head_dim
        self.num_heads = len(share.heads)
        self.num_kv_heads = len(share.kv_heads)
        hidden = attention.hidden_size
        self.qkv = ColumnParallelLinear(builder, hidden, share.parts(attention, names))
        inner = (share.heads.start * dim, share.heads.stop * dim)
        self.out = RowParallelLinear(
            builder, names["o"], attention.num_heads * dim, inner, hidden, is_copy=share.is_copy
        )
        assert attention.qk_norm is not None
        self.q_norm, self.k_norm = (make_norm(builder, names[n], dim, attention.qk_norm) for n in ("q_norm", "k_norm"))
        size = spec.index_dim
        own = OutputPart(
            names["index_q"], attention.num_kv_heads * size, share.kv_heads.start * size, share.kv_heads.stop * size
        )
        self.index_q = ColumnParallelLinear(builder, hidden, [own])
        self.index_k = ReplicatedLinear(builder, names["index_k"], hidden, size)
        self.index_norms = [
            make_norm(builder, names[n], size, attention.qk_norm) for n in ("index_q_norm", "index_k_norm")
        ]

    def __call__(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or len(wanted), hidden], this rank's summand. The rows of all tokens are
        stored."""
        assert isinstance(self.backend, Rows), "bind the cache first"
        assert self.cache is not None
        assert self.place.rotary is not None
        rotary = state.rotary[self.place.rotary]
        plan: StepTokens = state.plans[self.place.kv_group]
        tokens = len(x)
        qkv = self.qkv(x, state.slots).view(tokens, -1, self.spec.attention.head_dim)
        keys = self.num_heads + self.num_kv_heads
        q, k = self.kernels.rotary_embedding(
            self.q_norm(qkv[:, : self.num_heads]), self.k_norm(qkv[:, self.num_heads : keys]), *rotary
        )
        size = self.spec.index_dim
        index_q = self.index_norms[0](self.index_q(x, state.slots).view(tokens, -1, size))
        index_k = self.index_norms[1](self.index_k(x, state.slots).view(tokens, 1, size))
        index_q, index_k = self.kernels.rotary_embedding(index_q, index_k, *rotary)
        rows = torch.cat((k.flatten(1), qkv[:, keys:].flatten(1), index_k[:, 0]), 1)
        real = plan.slots >= 0
        self.backend.store(self.cache, rows[real], plan.slots[real])
        out = torch.zeros_like(q)
        starts = plan.layout.query_start_loc.tolist()
        for r, length in enumerate(plan.layout.seq_lens.tolist()):
            table = plan.layout.block_table[r : r + 1]
            if starts[r] == starts[r + 1]:
                continue
            places = self.backend.slots_of(table, torch.arange(length, device=x.device)[None])[0]
            read = self.backend.read(self.cache, places)
            step = max(1, _MOST_SCORES // (self.num_heads * length))
            for start in range(starts[r], starts[r + 1], step):
                here = slice(start, min(start + step, starts[r + 1]))
                out[here] = self._attend(q[here], index_q[here], read, plan.seen[here])
        return self.out(pick(out.flatten(1), wanted), state.slots_of(wanted))

    def _attend(self, q: Tensor, index_q: Tensor, rows: Tensor, seen: Tensor) -> Tensor:
        """Attend to the rows of a text. q: [tokens, heads, head_dim]; index_q: [tokens, kv_heads, index_dim]; rows:
        [length, size]; seen: [tokens], how many of them each token sees -> [tokens, heads, head_dim]"""
        dim = self.spec.attention.head_dim
        kv_heads = self.num_kv_heads
        sizes = [kv_heads * dim, kv_heads * dim, self.spec.index_dim]
        k, v, index_k = torch.split(rows.float(), sizes, 1)
        k, v = (part.view(len(rows), kv_heads, dim) for part in (k, v))
        visible = torch.arange(len(rows), device=q.device) < seen[:, None]  # [tokens, length]
        allowed = self._selected(index_q.float() @ index_k.T, visible)  # [tokens, kv_heads, length]
        grouped = q.float().view(len(q), kv_heads, -1, dim)
        scores = torch.einsum("tkgd,lkd->tkgl", grouped, k) * dim**-0.5
        weights = scores.masked_fill(~allowed[:, :, None], float("-inf")).softmax(-1)
        return torch.einsum("tkgl,lkd->tkgd", weights, v).reshape(q.shape).to(q.dtype)

    def _selected(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Return whether each KV head of a token attends to each token. scores: [tokens, kv_heads, length]; visible:
        [tokens, length] -> [tokens, kv_heads, length]"""
        size = self.spec.block_size
        length = scores.shape[-1]
        blocks = -(-length // size)
        scores = scores.masked_fill(~visible[:, None], float("-inf"))
        padded = torch.nn.functional.pad(scores, (0, blocks * size - length), value=float("-inf"))
        best = padded.view(*scores.shape[:2], blocks, size).amax(-1)  # [tokens, kv_heads, blocks]
        last = (visible.sum(1) - 1) // size
        number = torch.arange(blocks, device=scores.device)
        is_local = (number > last[:, None] - self.spec.local_blocks) & (number <= last[:, None])
        best = best.masked_fill(is_local[:, None], float("inf"))
        order = best.argsort(dim=-1, descending=True, stable=True)[..., : self.spec.top_blocks]
        chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, order, True)
        return chosen.repeat_interleave(size, -1)[..., :length] & visible[:, None]
