"""Paged attention on GPUs, in Triton (quire/ops/triton/attention.py, where the cache's layout is described)."""

from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
import triton
from torch import Tensor

from quire.attention.base import AttentionShape, Preparation, PreparingBackend, Scores, Selection, StepLayout
from quire.attention.cells import SCALE_BYTES
from quire.attention.tiles import Tile, choose_tiles
from quire.attention.triton.select import CELLS as _CELLS
from quire.attention.triton.select import select
from quire.ops.triton.attention import attend_kernel, merge_kernel, prepare_kernel, store_kernel
from quire.ops.triton.targets import INTERPRETED, precision
from quire.platform.gpu.cards import card_of

_MOST_SPLITS = 64
_FEWEST_KEYS = 128  # in a split
_BUSY = 0.85  # minimum utilization of the multiprocessors, if all programs take equally long


@dataclass
class TritonPlan:
    """How a step is divided. heads, tokens: their numbers in a tile's rows. tiles: an upper bound of the number of
    tiles. splits: the number of parts of a request's keys.

    one_tile: whether the rows of a request's tokens fit one tile. library: what another library has planned for the
    step, by options (paged_backend.py).
    """

    layout: StepLayout
    tile: Tile
    heads: int
    tokens: int
    tiles: int
    splits: int = 1
    one_tile: bool = False
    library: dict[Any, Any] = field(default_factory=dict)


class TritonAttention(PreparingBackend):
    """Supports float32, bfloat16 and float16, and any sizes."""

    name = kernels = "triton"
    capturable = True

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._group = shape.num_heads // shape.num_kv_heads
        self._planes = 1 if shape.value_dim is not None else 2
        self.cache_dtype, self._plane = shape.dtype, shape.block_size * shape.head_dim  # elements of a plane
        if shape.cell is not None:
            self.cache_dtype = torch.uint8
            self._plane = self._plane + shape.block_size * SCALE_BYTES
        self.block_shape = (shape.num_kv_heads, self._planes, self._plane)
        self._cell = _CELLS[shape.cell]
        first = shape.head_dim if shape.value_dim is None else shape.value_dim
        self._main = max(16, 1 << (first.bit_length() - 1))
        if shape.value_dim is not None:  # values are loaded together with the first part of the keys
            self._main = max(16, triton.next_power_of_2(first))
        rest = shape.head_dim - self._main
        self._rest = max(16, triton.next_power_of_2(rest)) if rest > 0 else 0
        self._card = card_of(shape.device)
        self._tiles = choose_tiles(self._card, shape)

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
        tokens = len(layout.slot_mapping)
        requests = len(layout.seq_lens)
        tile = self._tiles.many
        needed = self._group * layout.tokens_per_request  # rows of a request, if all have equally many
        if 0 < needed <= tile.rows and not self.shape.batch_invariant:
            if needed <= 2 * self._tiles.few.rows:
                tile = self._tiles.few
            tile = replace(tile, rows=max(self._tiles.few.rows, triton.next_power_of_2(needed)))
            longest = layout.block_table.shape[1] * (1 if self.shape.by_slot else self.shape.block_size)
            splits = self._splits(requests, longest)
            return TritonPlan(layout, tile, self._group, layout.tokens_per_request, requests, splits, True)
        heads = triton.cdiv(self._group, triton.cdiv(self._group, tile.rows))
        tile_tokens = tile.rows // heads
        return TritonPlan(layout, tile, heads, tile_tokens, tokens // tile_tokens + requests)

    def _splits(self, requests: int, longest: int) -> int:
        """Return the number of parts of the keys that keeps all multiprocessors busy, even when few programs are
        left."""
        slots = self._tiles.programs * self._card.processors
        programs = max(1, requests * self.shape.num_kv_heads)
        most = max(1, min(_MOST_SPLITS, longest // _FEWEST_KEYS))
        fewest = min(most, triton.cdiv(slots, programs))
        shares = [n * programs / (triton.cdiv(n * programs, slots) * slots) for n in range(1, most + 1)]
        good = (n for n in range(fewest, min(fewest + 8, most + 1)) if shares[n - 1] >= _BUSY)
        return next(good, fewest)

    def _registers(self, tile: Tile) -> dict[str, int]:
        """Return the option that limits registers. Prompts use it only on cards where products leave their results in
        tensor memory. For other cards, ptxas spills registers when it is allowed to use all of them."""
        if tile.rows < 32:
            return self._card.most_registers(tile.warps, self._tiles.programs)
        return self._card.most_registers(tile.warps, 1) if self._card.capability == 100 else {}

    def store(self, cache: Tensor, k: Tensor, v: Tensor | None, plan: TritonPlan) -> None:
        s = self.shape
        slots = plan.layout.slot_mapping
        k, v = _contiguous(k), k if v is None else _contiguous(v)
        if len(slots):
            store_kernel[(len(slots), s.num_kv_heads)](
                cache,
                k,
                v,
                slots,
                cache.stride(0),
                k.stride(0),
                k.stride(1),
                v.stride(0),
                v.stride(1),
                s.head_dim,
                self._plane,
                self._planes == 1,
                s.block_size,
                self._cell,
                self._card.has_float8,
                triton.next_power_of_2(s.head_dim),
                num_warps=1,
                enable_fp_fusion=False,
            )

    def read(self, cache: Tensor, blocks: Tensor, plane: int) -> Tensor:
        s = self.shape
        stored = cache[blocks.long(), :, plane].view(len(blocks), s.num_kv_heads, s.block_size, s.head_dim)
        return stored.transpose(1, 2).flatten(0, 1)

    def prepare(self, cache: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: TritonPlan, prep: Preparation) -> None:
        s = self.shape
        slots = plan.layout.slot_mapping
        if not len(slots):
            return
        norm = prep.q_weight is not None
        rotary = prep.cos is not None
        wide = prep.q_weight is not None and prep.q_weight.dtype is not q.dtype
        prepare_kernel[(len(slots), s.num_heads + 2 * s.num_kv_heads)](
            cache,
            q,
            k,
            v,
            slots,
            prep.q_weight if norm else q,
            prep.k_weight if norm else q,
            prep.cos if rotary else q,
            prep.sin if rotary else q,
            cache.stride(0),
            q.stride(0),
            q.stride(1),
            s.num_heads,
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            s.num_kv_heads,
            s.head_dim,
            1 if prep.cos is None else prep.cos.shape[1],
            self._plane,
            prep.eps,
            norm,
            wide,
            rotary,
            prep.interleaved,
            s.block_size,
            self._cell,
            self._card.has_float8,
            triton.next_power_of_2(s.head_dim),
            num_warps=1,
            enable_fp_fusion=False,
        )

    def select(self, q: Tensor, weights: Tensor, cache: Tensor, selection: Selection) -> None:
        s = self.shape
        select(q, weights, cache, selection, s.block_size, s.cell, self._card.has_float8)

    def attend(self, q: Tensor, cache: Tensor, plan: TritonPlan, **scores: Unpack[Scores]) -> tuple[Tensor, Tensor]:
        window = scores.get("window")
        soft_cap = scores.get("soft_cap")
        sinks = scores.get("sinks")
        bias = scores.get("bias")
        s = self.shape
        layout = plan.layout
        q = _contiguous(q)
        tokens, heads, _ = q.shape
        out = q.new_empty(tokens, heads, s.out_dim)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
        partial: Any = out
        partial_lse: Any = lse
        if plan.splits > 1:
            partial = torch.empty(tokens, heads, plan.splits, s.out_dim, dtype=torch.float32, device=q.device)
            partial_lse = torch.empty(tokens, heads, plan.splits, dtype=torch.float32, device=q.device)
        if not tokens:
            return out, lse
        tile = plan.tile
        parts = triton.cdiv(self._group, plan.heads)
        attend_kernel[(plan.tiles, s.num_kv_heads * parts, plan.splits)](
            out,
            lse,
            partial,
            partial_lse,
            q,
            cache,
            layout.block_table,
            layout.query_start_loc,
            layout.seq_lens,
            lse if sinks is None else sinks,
            lse if bias is None else bias,
            cache.stride(0),
            q.stride(0),
            q.stride(1),
            layout.block_table.stride(0),
            len(layout.seq_lens),
            plan.splits,
            heads,
            scores["scale"],
            soft_cap or 1.0,
            window or 0,
            0 if bias is None else bias.shape[1] // 2,
            self._plane,
            self._group,
            plan.heads,
            s.head_dim,
            self._main,
            self._rest,
            s.out_dim,
            self._planes == 1,
            s.block_size,
            self._cell,
            self._card.has_float8,
            sinks is not None,
            soft_cap is not None,
            window is not None,
            tile.rows,
            plan.tokens,
            tile.keys,
            plan.one_tile,
            plan.splits > 1,
            precision(s.dtype),
            s.by_slot,
            bias is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=not s.batch_invariant,
            **self._registers(tile),
        )
        if plan.splits > 1:
            merge_kernel[(tokens * heads,)](
                out,
                lse,
                partial,
                partial_lse,
                plan.splits,
                s.out_dim,
                triton.next_power_of_2(s.out_dim),
                _MOST_SPLITS,
                16,
                num_warps=4,
                enable_fp_fusion=not s.batch_invariant,
            )
        return out, lse


def _contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
