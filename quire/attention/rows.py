"""A cache of rows of numbers, one for each token, or one for each few tokens. Layers read the rows that they need."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.base import CacheBackend, StepLayout


@dataclass(frozen=True)
class StepTokens:
    """The tokens of a step. rows: [tokens], the row of each token's request in block_table; seen: [tokens], the number
    of tokens up to it, 1 for padding; slots: [tokens], -1 for padding."""

    layout: StepLayout
    rows: Tensor
    seen: Tensor
    slots: Tensor

    @classmethod
    def of(cls, layout: StepLayout) -> "StepTokens":
        tokens = len(layout.slot_mapping)
        starts = layout.query_start_loc
        lengths = layout.seq_lens
        token = torch.arange(tokens + 1, dtype=torch.int32, device=layout.slot_mapping.device)
        rows = torch.searchsorted(starts[1:].contiguous(), token[:-1], right=True, out_int32=True)
        rows = rows.clamp(max=len(lengths) - 1)  # padded tokens belong to no request
        seen = (lengths[rows] - starts[1:][rows] + token[1:]).where(token[:-1] < starts[-1], 1)
        return cls(layout, rows, seen, layout.slot_mapping)


class Rows(CacheBackend):
    """Rows of `size` numbers: one for each `rate` tokens, in the block of the last of them."""

    name = "rows"

    def __init__(self, size: int, dtype: torch.dtype, block_size: int, rate: int = 1) -> None:
        self.block_size = block_size
        self.rate = rate
        self.cache_dtype = dtype
        self.per_block = -(-block_size // rate)
        self.block_shape = (self.per_block, size)

    @property
    def tokens_per_block(self) -> int:
        return self.block_size

    @property
    def layout(self) -> str:
        return f"{self.cache_dtype}"

    def plan(self, layout: StepLayout, previous: StepTokens | None = None) -> StepTokens:
        return StepTokens.of(layout)

    def slots_of(self, table: Tensor, positions: Tensor) -> Tensor:
        """Return the slots of the rows that end at these positions. table: the block tables of their requests,
        [any, blocks]; positions: [any, n] -> [any, n], int64"""
        blocks = table.gather(1, (positions // self.block_size).clamp(0, table.shape[1] - 1).long()).long()
        return blocks * self.per_block + positions % self.block_size // self.rate

    def store(self, cache: Tensor, values: Tensor, slots: Tensor) -> None:
        """values: [n, size]; slots: [n]"""
        cache[slots // self.per_block, slots % self.per_block] = values.to(self.cache_dtype)

    def read(self, cache: Tensor, slots: Tensor) -> Tensor:
        """slots: any shape -> [*shape, size]"""
        return cache[slots // self.per_block, slots % self.per_block]
