"""Cross-attention: a decoder's queries see all tokens of an encoder, which are stored in separate blocks.

The inner backend receives each query as a separate request, whose query is the last of as many tokens as the encoder
has. Causal attention then covers all of them, so every backend works unchanged.
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, StepLayout
from quire.ops.memory import upload


def across(backend: AttentionBackend) -> AttentionBackend:
    """Return a copy of the backend whose queries see the tokens of an encoder."""
    crossing = copy.copy(backend)

    def plan(layout: StepLayout, previous: Any = None) -> Any:
        return backend.plan(cross_layout(layout), previous)

    crossing.plan = plan  # type: ignore[method-assign]
    return crossing


def cross_layout(layout: StepLayout) -> StepLayout:
    """Return the layout in which each token of a step is a request and nothing is stored."""
    assert layout.crossed is not None, "the model has no encoder"
    starts = layout.query_start_loc
    slots = layout.slot_mapping
    tokens = torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)
    requests = torch.searchsorted(starts[1:].contiguous(), tokens[:-1], right=True).clamp(max=len(starts) - 2)
    return replace(
        layout,
        query_start_loc=tokens,
        seq_lens=layout.crossed.index_select(0, requests),
        slot_mapping=torch.full_like(slots, -1),
        block_table=layout.block_table.index_select(0, requests),
        longest_prompt=0,
        tokens_per_request=1,
    )


def store_plan(backend: AttentionBackend, blocks: Tensor, length: int) -> Any:
    """Return the plan with which a backend made by `across` stores an encoder's keys and values. blocks: the ids of the
    request's blocks, [blocks], int64"""
    size = backend.tokens_per_block
    device = blocks.device
    slots = (blocks[:, None] * size + torch.arange(size, device=device)).flatten()[:length]
    bounds = upload(np.array([0, length], np.int32), device)
    layout = StepLayout(bounds, bounds[1:], slots, blocks.int()[None], longest_prompt=length)
    return type(backend).plan(backend, layout)  # the class's own plan, which `across` has replaced in the copy
