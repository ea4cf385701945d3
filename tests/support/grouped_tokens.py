"""Families of transformers whose results depend on padding, or whose new models have blank tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV4Config, DeepseekV4ForCausalLM, Glm5NextTextConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel, Glm5NextTextModel
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig

from support.text_models import causal_language_model


class OneByOne:
    """Generates for each text separately: transformers groups tokens by their places among padding."""

    def generate(self, ids: Tensor, attention_mask: Tensor, **options: Any) -> Any:
        made = []
        for row, mask in zip(ids, attention_mask, strict=True):
            text = row[mask.bool()][None]
            made.append(super().generate(text, attention_mask=torch.ones_like(text), **options))  # type: ignore[misc]
        new = torch.cat([one.sequences[:, -len(one.logits) :] for one in made])
        logits = [torch.cat(step) for step in zip(*(one.logits for one in made), strict=True)]
        return SimpleNamespace(sequences=torch.cat((ids, new), 1), logits=logits)


class WithTables(OneByOne, DeepseekV4ForCausalLM):
    """The experts of token ids are drawn at random. transformers' new models have zeros."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(3)
        for name, table in self.named_buffers():
            if name.endswith("tid2eid"):
                shuffled = torch.rand(config.vocab_size, config.n_routed_experts, generator=generator).argsort(-1)
                table.copy_(shuffled[:, : config.num_experts_per_tok])


class Blocks(OneByOne, MiniMaxM3VLForCausalLM):
    pass


Blocks.__name__ = "MiniMaxM3VLForCausalLM"
AutoModelForCausalLM.register(MiniMaxM3VLTextConfig, Blocks, exist_ok=True)
WithTables.__name__ = "DeepseekV4ForCausalLM"
AutoModelForCausalLM.register(DeepseekV4Config, WithTables, exist_ok=True)
causal_language_model("Glm5NextForCausalLM", Glm5NextPreTrainedModel, Glm5NextTextModel, Glm5NextTextConfig)
OF_LAYERS = [
    rule
    for rule in get_checkpoint_conversion_mapping("minimax_m3_vl")
    if not any(part in str(rule.target_patterns) for part in ("model.", "lm_head"))
]
register_checkpoint_conversion_mapping("minimax_m3_vl_text", OF_LAYERS, overwrite=True)
