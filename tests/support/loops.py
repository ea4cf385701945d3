"""IQuest-LoopCoder: Llama whose layers are run several times, with attention to the keys of the first time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from support.stand_ins import stand_in


class LoopAttention(LlamaAttention):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.gate = nn.Linear(config.head_dim, config.num_attention_heads)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor, again: bool = False, **given: Any
    ) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k, v = (part(hidden_states).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = (part.repeat_interleave(self.num_key_value_groups, 1) for part in (k, v))
        if again:
            places = torch.arange(q.shape[2])
            is_far = places[:, None] - places >= self.config.loop_window_size
            near = self._attend(q, k, v, attention_mask.masked_fill(is_far, float("-inf")))
            share = torch.sigmoid(torch.einsum("bhtd,hd->bht", q, self.gate.weight) + self.gate.bias[:, None])[
                ..., None
            ]
            out = self._attend(q, *self.first, attention_mask) * share + near * (1 - share)
        else:
            self.first = k, v
            out = self._attend(q, k, v, attention_mask)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.transpose(2, 3) * self.scaling + mask).softmax(-1) @ v


class Loops(nn.ModuleList):
    """Its slices have all layers once for each loop."""

    loops = 1

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        layers = list(self)
        return layers + [partial(layer, again=True) for _ in range(self.loops - 1) for layer in layers]


def with_loops(network: Any) -> None:
    config = network.config
    for i, layer in enumerate(network.model.layers):
        layer.self_attn = LoopAttention(config, i)
    network.model.layers = Loops(network.model.layers)
    network.model.layers.loops = config.loop_num
    network.generation_config.use_cache = False  # which has room for one loop


stand_in("iquestloopcoder", "IQuestLoopCoderForCausalLM", LlamaConfig, LlamaForCausalLM, with_loops)
