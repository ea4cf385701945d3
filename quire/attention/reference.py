"""Paged attention in plain torch: a loop over requests that gathers their blocks. The definition, and the fallback."""

import math

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape, StepLayout


class ReferenceAttention(AttentionBackend):
    """Any device, dtype and shape. Cache: [2 (keys, values), blocks, block_size, kv_heads, head_dim]; latent: keys."""

    name = "reference"

    @classmethod
    def unsupported(cls, shape: AttentionShape) -> str | None:
        return None

    def _cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        s = self.shape
        return (2 if s.value_dim is None else 1, num_blocks, s.block_size, s.num_kv_heads, s.head_dim)

    def block_bytes(self) -> int:
        return math.prod(self._cache_shape(1)) * self.shape.dtype.itemsize

    def allocate(self, num_blocks: int) -> Tensor:
        return torch.zeros(self._cache_shape(num_blocks), dtype=self.shape.dtype, device=self.shape.device)

    def plan(self, layout: StepLayout) -> StepLayout:
        return layout

    def store(self, cache: Tensor, k: Tensor, v: Tensor | None, plan: StepLayout) -> None:
        slots = cache.flatten(1, 2)  # a view: [2, slots, kv_heads, head_dim]
        slots[0, plan.slot_mapping] = k
        if v is not None:
            slots[1, plan.slot_mapping] = v

    def attend(
        self,
        q: Tensor,
        cache: Tensor,
        plan: StepLayout,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        out = q.new_empty(*q.shape[:2], self.shape.out_dim)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        starts, lengths = plan.query_start_loc.tolist(), plan.seq_lens.tolist()
        group = self.shape.num_heads // self.shape.num_kv_heads
        for r, length in enumerate(lengths):
            start, end = starts[r], starts[r + 1]
            blocks = plan.block_table[r, : -(-length // self.shape.block_size)].long()
            kv = cache[:, blocks].flatten(1, 2)[:, :length].float().repeat_interleave(group, dim=2)
            k, v = kv[0], kv[-1, ..., : self.shape.out_dim]  # [length, heads, head_dim], [length, heads, out_dim]
            scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            position = torch.arange(length - (end - start), length, device=q.device)[:, None]
            key = torch.arange(length, device=q.device)[None, :]
            seen = key <= position
            if window is not None:
                seen &= key > position - window
            scores.masked_fill_(~seen, float("-inf"))
            total = scores.logsumexp(-1)  # [heads, queries]
            if sinks is not None:
                total = total.logaddexp(sinks[:, None])
            lse[start:end] = total.T
            out[start:end] = torch.einsum("hqk,khd->qhd", (scores - total[..., None]).exp(), v).to(q.dtype)
        return out, lse
