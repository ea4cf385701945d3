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
from quire.ops.triton.attention import attend_kernel, prepare_kernel, store_kernel
from quire.ops.triton.attention_work import merge_kernel, plan_kernel
from quire.ops.triton.targets import INTERPRETED, overlap, precision
from quire.platform.gpu.cards import card_of

_MOST_PARTS = 128  # of the keys of a tile
_FEWEST_KEYS = 128  # in a part
_PARTS_PER_PROGRAM = 2  # parts of the step's work for each program that runs at once: the last ones end together
_UNDIVIDED = 1 << 30
_MERGING = 16  # programs of merge_kernel on a multiprocessor
_BLOCK = 256  # tiles that are planned at once


@dataclass
class TritonPlan:
    """How a step is divided. heads, tokens: their numbers in a tile's rows. tiles: an upper bound of the number of
    tiles. one_tile: whether the rows of a request's tokens fit one tile.

    work: the plan that attention_work.py describes, with `items` rows of items. partials: an upper bound of the number
    of items of divided tiles; 0 if no tile can be divided. merges: of divided tiles. parts: see plan_kernel. library:
    what another library has planned for the step, by options (paged_backend.py).
    """

    layout: StepLayout
    tile: Tile
    heads: int
    tokens: int
    tiles: int
    one_tile: bool
    items: int
    partials: int
    merges: int
    parts: int
    work: Tensor
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
        self._launch = overlap(shape.device)  # of launches that may overlap with the one before

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
            self._divide(previous)
            return previous
        tokens = len(layout.slot_mapping)
        requests = len(layout.seq_lens)
        tile = self._tiles.many
        needed = self._group * layout.tokens_per_request  # rows of a request, if all have equally many
        if 0 < needed <= tile.rows and not self.shape.batch_invariant:
            if needed <= 2 * self._tiles.few.rows:
                tile = self._tiles.few
            tile = replace(tile, rows=max(self._tiles.few.rows, triton.next_power_of_2(needed)))
            return self._planned(layout, tile, self._group, layout.tokens_per_request, requests, True)
        heads = triton.cdiv(self._group, triton.cdiv(self._group, tile.rows))
        tile_tokens = tile.rows // heads
        return self._planned(layout, tile, heads, tile_tokens, tokens // tile_tokens + requests, False)

    def _planned(
        self, layout: StepLayout, tile: Tile, heads: int, tokens: int, tiles: int, one_tile: bool
    ) -> TritonPlan:
        """Return a plan with enough items for any lengths of the requests. See TritonPlan for the arguments.

        A tile with more than a part's share of the keys is divided. So there are fewer divided tiles than parts, and
        they have fewer than twice as many items.
        """
        longest = layout.block_table.shape[1] * (1 if self.shape.by_slot else self.shape.block_size)
        most = min(_MOST_PARTS, triton.cdiv(longest, _FEWEST_KEYS))
        is_divided = most > 1 and not self.shape.batch_invariant
        slots = self._tiles.programs * self._card.processors
        programs = self.shape.num_kv_heads * triton.cdiv(self._group, heads)  # of an item
        parts = max(1, _PARTS_PER_PROGRAM * slots // programs) if is_divided else 0
        items = min(tiles + parts, tiles * most)
        partials = min(2 * parts, items)
        merges = min(parts, tiles)
        work = torch.empty(1 + items + merges, 4, dtype=torch.int32, device=layout.seq_lens.device)
        plan = TritonPlan(layout, tile, heads, tokens, tiles, one_tile, items, partials, merges, parts, work)
        self._divide(plan)
        return plan

    def _divide(self, plan: TritonPlan) -> None:
        """Write the plan's work items for the lengths that its layout has now."""
        layout = plan.layout
        plan_kernel[(1,)](
            plan.work,
            layout.query_start_loc,
            layout.seq_lens,
            len(layout.seq_lens),
            plan.tiles,
            plan.items,
            max(1, plan.parts),
            max(1, _FEWEST_KEYS // plan.tile.keys) if plan.parts else _UNDIVIDED,
            _MOST_PARTS,
            plan.tokens,
            plan.tile.keys,
            plan.one_tile,
            _BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )

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
            bool(self._launch),
            num_warps=1,
            enable_fp_fusion=False,
            **self._launch,
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
        if plan.partials:
            partial = torch.empty(plan.partials, plan.tokens, heads, s.out_dim, dtype=torch.float32, device=q.device)
            partial_lse = torch.empty(plan.partials, plan.tokens, heads, dtype=torch.float32, device=q.device)
        if not tokens:
            return out, lse
        tile = plan.tile
        parts = triton.cdiv(self._group, plan.heads)
        attend_kernel[(plan.items, s.num_kv_heads * parts)](
            out,
            lse,
            partial,
            partial_lse,
            q,
            cache,
            plan.work,
            layout.block_table,
            layout.query_start_loc,
            layout.seq_lens,
            lse if sinks is None else sinks,
            lse if bias is None else bias,
            cache.stride(0),
            q.stride(0),
            q.stride(1),
            layout.block_table.stride(0),
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
            plan.partials > 0,
            precision(s.dtype),
            s.by_slot,
            bias is not None,
            bool(self._launch),
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=not s.batch_invariant,
            **self._registers(tile),
            **self._launch,
        )
        if plan.partials:
            rows = plan.merges * plan.tokens
            programs = max(1, _MERGING * self._card.processors // heads)  # of a head
            merge_kernel[(min(rows, programs), heads)](
                out,
                lse,
                partial,
                partial_lse,
                plan.work,
                layout.query_start_loc,
                plan.items,
                plan.tokens,
                heads,
                s.out_dim,
                triton.next_power_of_2(s.out_dim),
                _MOST_PARTS,
                16,
                bool(self._launch),
                num_warps=2,
                enable_fp_fusion=True,  # never in batch-invariant steps
                **self._launch,
            )
        return out, lse


def _contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
