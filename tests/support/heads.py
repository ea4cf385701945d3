"""Runs a head that drafts one token after the other, over a paged cache of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape
from quire.attention.selection import choose_backend
from quire.attention.sparse import SparseAttention
from quire.layers.forward_state import ForwardState
from quire.layers.step_inputs import StepInputs, StepSize
from quire.models.heads.head import ChainHead

BLOCK_SIZES, NUM_BLOCKS = {"reference": 4}, 9  # other backends need a multiple of 16
CPU = torch.device("cpu")


class HeadText:
    """One text of a head, whose blocks are not in the order of the text. backend: the attention's."""

    def __init__(self, head: ChainHead, backend: str = "reference", num_blocks: int = NUM_BLOCKS) -> None:
        self.head, self.length, self.block_size = head, 0, BLOCK_SIZES.get(backend, 16)
        self.blocks = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        shapes = [
            AttentionShape(s.num_heads, s.num_kv_heads, s.head_dim, self.block_size, torch.float32, CPU, s.value_dim)
            for s in head.cache_shapes
        ]
        choose = partial(choose_backend, pinned=backend)
        self.backends: list[AttentionBackend] = [
            choose(shape) if s.indexer is None else SparseAttention(shape, s.indexer.top_k, s.indexer.head_dim, choose)
            for s, shape in zip(head.cache_shapes, shapes, strict=True)
        ]
        sizes = [spec.page_bytes(b.entry_bytes) for spec, b in zip(head.kv_specs, self.backends, strict=True)]
        head.bind_cache(self.backends, [torch.zeros(num_blocks, size, dtype=torch.uint8) for size in sizes])

    def run(self, x: Tensor, wanted: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """x: results of `embed` for the next positions of the text, or for others -> hidden states"""
        count, groups, size = len(x), len(self.backends), self.block_size
        entries = torch.arange(self.length, self.length + count)
        positions = entries if positions is None else positions
        self.length += count
        slots = self.blocks[entries // size] * size + entries % size
        inputs = StepInputs(
            size=StepSize(count, 1, count),
            longest_prompt=count if count == self.length else 0,
            input_ids=torch.zeros(count, dtype=torch.int64),
            positions=positions,
            slot_mapping=slots.expand(groups, -1).contiguous(),
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([self.length], dtype=torch.int32),
            block_tables=self.blocks.to(torch.int32).expand(groups, 1, -1).contiguous(),
        )
        layouts = zip(self.backends, inputs.layouts(), strict=True)
        plans: list[Any] = [backend.plan(layout) for backend, layout in layouts]
        state = ForwardState(inputs, [table(positions) for table in self.head.rotary], plans)
        return self.head.forward(x, state, wanted)
