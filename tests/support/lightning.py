"""Ling 2.5: DeepSeek-V3 whose first layers of each group have lightning attention (arXiv:2401.04658)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from support.changed_attention import _slopes
from support.stand_ins import stand_in


class LightningAttention(nn.Module):
    """In the form of a sum over all earlier tokens: out(t) = sum of decay ^ (t - s) * (q(t) . k(s)) * v(s)."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = index
        heads, dim = config.num_attention_heads, config.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, 3 * heads * dim, bias=False)
        self.query_layernorm = nn.RMSNorm(dim, config.rms_norm_eps)
        self.key_layernorm = nn.RMSNorm(dim, config.rms_norm_eps)
        self.g_proj = nn.Linear(config.hidden_size, heads * dim, bias=False)
        self.g_norm = nn.RMSNorm(heads * dim, config.rms_norm_eps)
        self.dense = nn.Linear(heads * dim, config.hidden_size, bias=False)
        self.rate = 1 - index / (config.num_hidden_layers - 1) + 1e-5

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any = None, **given: Any
    ) -> tuple[Tensor, None]:
        config = self.config
        heads, dim = config.num_attention_heads, config.head_dim
        shape = (*hidden_states.shape[:2], heads, dim)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.query_key_value(hidden_states).chunk(3, -1))
        q, k = (self._rotated(part, position_ids) for part in (self.query_layernorm(q), self.key_layernorm(k)))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        keys = k.shape[2]
        distance = torch.arange(keys - q.shape[2], keys)[:, None] - torch.arange(keys)
        decays = torch.exp(-_slopes(heads)[:, None, None] * self.rate * distance.clamp(min=0))
        visible = attention_mask[..., :keys] == 0
        out = (q @ k.transpose(2, 3) * dim**-0.5 * decays * visible).to(v.dtype) @ v  # [batch, heads, tokens, dim]
        out = self._normed(out.transpose(1, 2).reshape(*shape[:2], -1))
        return self.dense(torch.sigmoid(self.g_proj(hidden_states)) * out), None

    def _normed(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (self.config.group_norm_size, -1))
        size = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (groups * size).flatten(-2) * self.g_norm.weight

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """The first half of each head: x is [batch, heads, tokens, dim]"""
        size = self.config.head_dim // 2
        frequencies = self.config.rope_parameters["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angles = positions[:, None, :, None] * frequencies
        first, second, rest = torch.split(x, [size // 2, size // 2, x.shape[-1] - size], -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def with_lightning(network: Any) -> None:
    config = network.config
    for i, layer in enumerate(network.model.layers):
        if (i + 1) % config.layer_group_size:
            layer.self_attn = LightningAttention(config, i)


stand_in("bailing_moe_linear", "BailingMoeV2_5ForCausalLM", DeepseekV3Config, DeepseekV3ForCausalLM, with_lightning)
