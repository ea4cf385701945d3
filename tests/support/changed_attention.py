"""Families that transformers lacks, made of families that it has: with another attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from support.stand_ins import stand_in


class RootAttention(LlamaAttention):
    """No rotation, but biases of -slope * sqrt(distance), with the slopes of ALiBi (arXiv:2108.12409, section 3)."""

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor, **given: Any
    ) -> tuple[Tensor, Tensor]:
        cos, sin = position_embeddings
        queries, keys = attention_mask.shape[-2:]
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        biases = -_slopes(self.config.num_attention_heads)[:, None, None] * distance.clamp(min=0).sqrt()
        unrotated = torch.ones_like(cos), torch.zeros_like(sin)
        return super().forward(hidden_states, unrotated, attention_mask + biases, **given)  # type: ignore[no-any-return]


def _slopes(heads: int) -> Tensor:
    """The authors' code: for a number that is no power of two, every other slope of the next one fills up."""
    if math.log2(heads).is_integer():
        return torch.tensor([2 ** (-8 / heads * (i + 1)) for i in range(heads)])
    least = 2 ** math.floor(math.log2(heads))
    return torch.cat([_slopes(least), _slopes(2 * least)[::2][: heads - least]])


def with_roots(network: Any) -> None:
    for i, layer in enumerate(network.model.layers):
        layer.self_attn = RootAttention(network.config, i)


stand_in(
    "step1",
    "Step1ForCausalLM",
    LlamaConfig,
    LlamaForCausalLM,
    with_roots,
    num_key_value_heads="num_attention_groups",
    max_position_embeddings="max_seq_len",
)
