"""Paged attention in plain torch, the definition and fallback: it loops over requests and gathers their blocks."""

from collections.abc import Callable
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape, Scores, Selection, StepLayout
from quire.attention.cells import from_bytes, to_bytes, vector_bytes
from quire.ops.reference.encoder_attention import bias_of


class ReferenceAttention(AttentionBackend):
    """Supports any device, dtype and shape. Cache: [blocks, kv_heads, 2 (keys, values), block_size, head_dim]; latent:
    keys.

    A cache of cells consists of bytes: the cells of a head, followed by their scale.
    """

    name = "reference"

    @classmethod
    def unsupported(cls, shape: AttentionShape) -> str | None:
        return "results of torch's products depend on the batch (batch_invariant)" if shape.batch_invariant else None

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.cache_dtype = shape.dtype
        dim = shape.head_dim
        self._encode: Callable[[Tensor], Tensor] = lambda x: x
        self._decode: Callable[[Tensor], Tensor] = Tensor.float
        if shape.cell is not None:
            self.cache_dtype = torch.uint8
            dim = vector_bytes(dim, shape.cell)
            self._encode, self._decode = (partial(f, cell=shape.cell) for f in (to_bytes, from_bytes))
        self.block_shape = (shape.num_kv_heads, 2 if shape.value_dim is None else 1, shape.block_size, dim)

    def plan(self, layout: StepLayout, previous: StepLayout | None = None) -> StepLayout:
        return layout

    def store(self, cache: Tensor, k: Tensor, v: Tensor | None, plan: StepLayout) -> None:
        if not len(plan.slot_mapping):
            return
        # A token that is not stored repeats the first stored one. Selecting tokens would make the host wait for a GPU.
        stored = plan.slot_mapping >= 0
        tokens = torch.where(stored, torch.arange(len(stored), device=stored.device), stored.int().argmax())
        slots = plan.slot_mapping[tokens].clamp(min=0)
        block = slots // self.shape.block_size
        offset = slots % self.shape.block_size
        for plane, x in enumerate([k] if v is None else [k, v]):
            before = cache[block, :, plane, offset]
            cache[block, :, plane, offset] = torch.where(stored.any(), self._encode(x[tokens]), before)

    def read(self, cache: Tensor, blocks: Tensor, plane: int) -> Tensor:
        return self._decode(cache[blocks.long(), :, plane]).transpose(1, 2).flatten(0, 1)

    def _keys(self, cache: Tensor, table: Tensor, length: int, by_slot: bool = False) -> Tensor:
        """Return the keys and values, or latents, of a request: [2 or 1, length, kv_heads, dim]"""
        size = self.shape.block_size
        if by_slot:
            slots = table[:length].long()
            return self._decode(cache[slots // size, :, :, slots % size].permute(2, 0, 1, 3))
        blocks = table[: -(-length // size)].long()
        return self._decode(cache[blocks].permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :length])

    def select(self, q: Tensor, weights: Tensor, cache: Tensor, selection: Selection) -> None:
        size = self.shape.block_size
        most = selection.slots.shape[1]
        best = selection.scores
        for token, (row, seen) in enumerate(zip(selection.rows.tolist(), selection.seen.tolist(), strict=True)):
            table = selection.block_table[row]
            positions = torch.arange(seen, device=q.device)
            if seen > most or best is not None:
                keys = self._keys(cache, table, seen)[0, :, 0]
                scores = weights[token].float() @ (q[token].float() @ keys.T).relu()
                positions = scores.argsort(descending=True, stable=True)[:most].sort().values
            if best is None:
                selection.slots[token, : len(positions)] = table[positions // size] * size + positions % size
            else:
                selection.slots[token, : len(positions)] = positions
                best[token, : len(positions)] = scores[positions]

    def attend(self, q: Tensor, cache: Tensor, plan: StepLayout, **how: Unpack[Scores]) -> tuple[Tensor, Tensor]:
        window = how.get("window")
        soft_cap = how.get("soft_cap")
        sinks = how.get("sinks")
        bias = how.get("bias")
        out = q.new_empty(*q.shape[:2], self.shape.out_dim)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        starts = plan.query_start_loc.tolist()
        lengths = plan.seq_lens.tolist()
        group = self.shape.num_heads // self.shape.num_kv_heads
        for r, length in enumerate(lengths):
            start = starts[r]
            end = starts[r + 1]
            kv = self._keys(cache, plan.block_table[r], length, self.shape.by_slot).repeat_interleave(group, dim=2)
            k, v = kv[0], kv[-1, ..., : self.shape.out_dim]  # [length, heads, head_dim], [length, heads, out_dim]
            scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k) * how["scale"]
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            position = torch.arange(length - (end - start), length, device=q.device)[:, None]
            key = torch.arange(length, device=q.device)[None, :]
            if bias is not None:
                scores += bias_of(bias, key - position)
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
