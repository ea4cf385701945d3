"""Paged attention on GPUs, in Triton (ops/triton/attention.py, where the cache's layout is described)."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from quire.attention.base import AttentionShape, Preparation, PreparingBackend, StepLayout
from quire.attention.cells import SCALE_BYTES
from quire.ops.triton import INTERPRETED, precision
from quire.ops.triton.attention import attend_kernel, merge_kernel, prepare_kernel, store_kernel

_CELLS = {None: 0, torch.int8: 1, torch.float8_e4m3fn: 2}
_MOST_SPLITS = 64
_WAVES = 2  # programs for each multiprocessor, if the keys are split to have that many


@dataclass
class TritonPlan:
    """How a step is divided. rows, tokens: of a tile. tiles: an upper bound. splits: parts of each request's keys."""

    layout: StepLayout
    rows: int
    tokens: int
    tiles: int
    splits: int


class TritonAttention(PreparingBackend):
    """float32, bfloat16 and float16, any sizes."""

    name = kernels = "triton"
    capturable = True

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._group = shape.num_heads // shape.num_kv_heads
        self._planes = 1 if shape.value_dim is not None else 2
        self.cache_dtype, self._plane = shape.dtype, shape.block_size * shape.head_dim  # elements of a plane
        if shape.cell is not None:
            self.cache_dtype, self._plane = torch.uint8, self._plane + shape.block_size * SCALE_BYTES
        self.block_shape = (shape.num_kv_heads, self._planes, self._plane)
        self._cell = _CELLS[shape.cell]
        self._main = max(16, 1 << (shape.head_dim.bit_length() - 1))
        rest = shape.head_dim - self._main
        self._rest = max(16, triton.next_power_of_2(rest)) if rest > 0 else 0
        self._out_block = max(16, triton.next_power_of_2(shape.out_dim))
        self._is_wide = shape.head_dim > 256 and shape.dtype is torch.float32  # else tiles exceed shared memory
        self._processors = 1
        if shape.device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(shape.device).multi_processor_count

    @classmethod
    def unsupported(cls, shape: AttentionShape) -> str | None:
        if shape.device.type != "cuda" and not INTERPRETED:
            return f"the triton backend does not run on {shape.device.type}"
        if shape.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the triton backend supports float32, bfloat16 and float16, not {shape.dtype}"
        if shape.cell is not None and (shape.block_size * shape.head_dim) % SCALE_BYTES:
            return f"the scales of blocks of {shape.block_size} x {shape.head_dim} bytes would not be aligned"
        return None

    def plan(self, layout: StepLayout, previous: TritonPlan | None = None) -> TritonPlan:
        if previous is not None:
            for name in ("query_start_loc", "seq_lens", "slot_mapping"):
                getattr(previous.layout, name).copy_(getattr(layout, name), non_blocking=True)
            previous.layout.block_table[:, : layout.block_table.shape[1]].copy_(layout.block_table, non_blocking=True)
            return previous
        tokens, requests = len(layout.slot_mapping), len(layout.seq_lens)
        rows = 16 if self._is_wide else 64
        if self.shape.head_dim <= 128:
            rows = 128
        rows = max(rows, triton.next_power_of_2(self._group))
        tile_tokens, splits = rows // self._group, 1
        one_tile = 0 < layout.tokens_per_request <= tile_tokens
        if one_tile and not self.shape.batch_invariant:  # one tile for each request; its keys are split
            tile_tokens = layout.tokens_per_request
            rows = max(16, triton.next_power_of_2(self._group * tile_tokens))
            wanted = _WAVES * self._processors / max(1, requests * self.shape.num_kv_heads)
            longest = layout.block_table.shape[1] * self.shape.block_size
            splits = min(
                _MOST_SPLITS, 1 << max(0, math.ceil(math.log2(wanted))), triton.next_power_of_2(-(-longest // 128))
            )
        return TritonPlan(layout, rows, tile_tokens, tokens // tile_tokens + requests, splits)

    def store(self, cache: Tensor, k: Tensor, v: Tensor | None, plan: TritonPlan) -> None:
        s, slots = self.shape, plan.layout.slot_mapping
        k, v = _dense(k), k if v is None else _dense(v)
        if len(slots):
            store_kernel[(len(slots), s.num_kv_heads)](
                cache, k, v, slots, cache.stride(0), k.stride(0), k.stride(1), v.stride(0), v.stride(1), s.head_dim,
                self._plane, self._planes == 1, s.block_size, self._cell, triton.next_power_of_2(s.head_dim),
                num_warps=1,
            )  # fmt: skip

    def prepare(self, cache: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: TritonPlan, prep: Preparation) -> None:
        s, slots = self.shape, plan.layout.slot_mapping
        if not len(slots):
            return
        norm, rotary = prep.q_weight is not None, prep.cos is not None
        wide = prep.q_weight is not None and prep.q_weight.dtype is not q.dtype
        prepare_kernel[(len(slots), s.num_heads + 2 * s.num_kv_heads)](
            cache, q, k, v, slots, prep.q_weight if norm else q, prep.k_weight if norm else q,
            prep.cos if rotary else q, prep.sin if rotary else q, cache.stride(0), q.stride(0), q.stride(1),
            s.num_heads, k.stride(0), k.stride(1), v.stride(0), v.stride(1), s.num_kv_heads, s.head_dim,
            1 if prep.cos is None else prep.cos.shape[1], self._plane, prep.eps, norm, wide, rotary, prep.interleaved,
            s.block_size, self._cell, triton.next_power_of_2(s.head_dim), num_warps=1,
        )  # fmt: skip

    def attend(
        self,
        q: Tensor,
        cache: Tensor,
        plan: TritonPlan,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        s, layout, q = self.shape, plan.layout, _dense(q)
        tokens, heads, _ = q.shape
        out = q.new_empty(tokens, heads, s.out_dim)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
        partial: Any = out
        partial_lse: Any = lse
        if plan.splits > 1:
            partial = torch.empty(tokens, heads, plan.splits, self._out_block, dtype=torch.float32, device=q.device)
            partial_lse = torch.empty(tokens, heads, plan.splits, dtype=torch.float32, device=q.device)
        if not tokens:
            return out, lse
        keys, warps, stages = self._tile(plan)
        attend_kernel[(plan.tiles, s.num_kv_heads, plan.splits)](
            out, lse, partial, partial_lse, q, cache, layout.block_table, layout.query_start_loc, layout.seq_lens,
            lse if sinks is None else sinks, cache.stride(0), q.stride(0), q.stride(1), layout.block_table.stride(0),
            len(layout.seq_lens), plan.splits, s.num_kv_heads, scale, soft_cap or 1.0, window or 0, self._plane,
            self._group, s.head_dim, self._main, self._rest, s.out_dim, self._out_block, self._planes == 1,
            s.block_size, self._cell, sinks is not None, soft_cap is not None, window is not None, plan.rows,
            plan.tokens, keys, plan.splits > 1, precision(s.dtype), num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if plan.splits > 1:
            merge_kernel[(tokens * heads,)](out, lse, partial, partial_lse, s.out_dim, self._out_block, plan.splits)
        return out, lse

    def _tile(self, plan: TritonPlan) -> tuple[int, int, int]:
        """(keys of a tile, warps, pipeline stages of loads)"""
        large = self.shape.head_dim > 256
        if self.shape.dtype is torch.float32:
            return (16, 4, 1) if large else (32, 4, 2)
        if plan.rows >= 64:
            return (32, 8, 2) if large else (64, 8 if plan.rows >= 128 else 4, 3)
        return (32, 4, 2) if large else (64, 4, 3)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
