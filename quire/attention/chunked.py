"""Attention in chunks of the text (Llama 4): a query sees the keys of its own chunk only, up to its own position.

The inner backend receives each chunk of a request as a separate request that begins at the chunk's first block. So
every backend works unchanged.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, StepLayout


def in_chunks(backend: AttentionBackend, chunk: int) -> AttentionBackend:
    """Return a copy of the backend whose queries see only their own chunks. chunk: tokens, a multiple of the block
    size.

    Raises ValueError if `chunk` is not such a multiple.
    """
    size = backend.shape.block_size
    if chunk % size:
        raise ValueError(f"block_size={size} does not divide the {chunk} tokens of an attention chunk of this model")
    chunked = copy.copy(backend)

    def plan(layout: StepLayout, previous: Any = None) -> Any:
        return backend.plan(chunk_layout(layout, chunk, size), previous)

    chunked.plan = plan  # type: ignore[method-assign]
    return chunked


def chunk_layout(layout: StepLayout, chunk: int, block_size: int) -> StepLayout:
    """Return the layout in which each chunk that a step touches is a request. Some of these requests may have no
    tokens.

    The number of these requests depends only on the numbers of requests and tokens, so recorded steps can be replayed.
    """
    device = layout.seq_lens.device
    starts = layout.query_start_loc
    lengths = layout.seq_lens
    parts = 1 if layout.tokens_per_request == 1 else (len(layout.slot_mapping) - 1) // chunk + 2
    first = lengths - starts.diff()  # the position of each request's first token
    begins = (first // chunk)[:, None] * chunk + torch.arange(parts, dtype=torch.int32, device=device) * chunk
    ends = torch.minimum(begins + chunk, lengths[:, None])  # [requests, parts]
    stops = starts[:-1, None] + (ends - first[:, None]).clamp(min=0)
    new_starts = torch.cat([starts[:1], stops.flatten()])
    new_lengths = (ends - begins).flatten() * (new_starts.diff() > 0)
    return replace(
        layout,
        query_start_loc=new_starts.int(),
        seq_lens=new_lengths.int(),
        block_table=_tables(layout.block_table, begins // block_size, chunk // block_size),
        longest_prompt=min(layout.longest_prompt, chunk),
        tokens_per_request=layout.tokens_per_request if parts == 1 else 0,
    )


def _tables(table: Tensor, first: Tensor, blocks: int) -> Tensor:
    """Return the block tables of chunks. first: the index of each chunk's first block, [requests, parts]. blocks: the
    blocks of a chunk."""
    width = table.shape[1]
    indices = first.long()[..., None] + torch.arange(min(blocks, width), device=table.device)
    picked = table[:, None, :].expand(-1, first.shape[1], -1).gather(2, indices.clamp(max=width - 1))
    return picked.flatten(0, 1).contiguous()
