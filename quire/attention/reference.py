"""Paged attention in plain torch: a loop over requests that gathers their blocks. The definition, and the fallback."""

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape, StepLayout


class ReferenceAttention(AttentionBackend):
    """Any device, dtype and shape. Cache: [2 (keys, values), blocks, block_size, kv_heads, head_dim]."""

    name = "reference"

    @classmethod
    def unsupported(cls, shape: AttentionShape) -> str | None:
        return None

    def block_bytes(self) -> int:
        s = self.shape
        return 2 * s.block_size * s.num_kv_heads * s.head_dim * s.dtype.itemsize

    def allocate(self, num_blocks: int) -> Tensor:
        s = self.shape
        size = (2, num_blocks, s.block_size, s.num_kv_heads, s.head_dim)
        return torch.zeros(size, dtype=s.dtype, device=s.device)

    def plan(self, layout: StepLayout) -> StepLayout:
        return layout

    def store(self, cache: Tensor, k: Tensor, v: Tensor, plan: StepLayout) -> None:
        slots = cache.view(2, -1, *cache.shape[3:])  # [2, slots, kv_heads, head_dim]
        slots[0, plan.slot_mapping] = k
        slots[1, plan.slot_mapping] = v

    def attend(
        self, q: Tensor, cache: Tensor, plan: StepLayout, *, scale: float, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        starts, lengths = plan.query_start_loc.tolist(), plan.seq_lens.tolist()
        group = self.shape.num_heads // self.shape.num_kv_heads
        for r, length in enumerate(lengths):
            start, end = starts[r], starts[r + 1]
            blocks = plan.block_table[r, : -(-length // self.shape.block_size)].long()
            k, v = cache[:, blocks].flatten(1, 2)[:, :length].float().repeat_interleave(group, dim=2)
            scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k) * scale
            position = torch.arange(length - (end - start), length, device=q.device)[:, None]
            key = torch.arange(length, device=q.device)[None, :]
            seen = key <= position
            if window is not None:
                seen &= key > position - window
            scores.masked_fill_(~seen, float("-inf"))
            lse[start:end] = scores.logsumexp(-1).T
            out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
        return out, lse
