"""Text models that transformers has only as a part of a larger model: causal language models are made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, MuseGlimmerTextConfig, Step3p7TextConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerPreTrainedModel, MuseGlimmerTextModel
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

ToLogits = Callable[[Any, Tensor], Tensor]


def causal_language_model(name: str, base: Any, of: Any, config: Any, to_logits: ToLogits = lambda _, x: x) -> None:
    """Register a class called `name`. base: the family's base class. of: the class of the text model. to_logits: a
    function of the config and the head's results."""

    class CausalLM(base, GenerationMixin):  # type: ignore[misc]
        config_class = config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = of(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def get_input_embeddings(self) -> nn.Module:
            return self.model.embed_tokens  # type: ignore[no-any-return]

        def forward(self, input_ids: Tensor, **options: Any) -> CausalLMOutputWithPast:
            made = self.model(input_ids, **options)
            logits = to_logits(self.config, self.lm_head(made.last_hidden_state))
            return CausalLMOutputWithPast(logits=logits, cache=made.cache)

    CausalLM.__name__ = CausalLM.__qualname__ = name
    AutoModelForCausalLM.register(config, CausalLM, exist_ok=True)


def _capped(config: Any, x: Tensor) -> Tensor:
    cap = config.final_logit_softcapping
    return torch.tanh(x * config.output_multiplier / cap) * cap


causal_language_model("Step3p5ForCausalLM", Step3p7PreTrainedModel, Step3p7TextModel, Step3p7TextConfig)
causal_language_model(
    "MuseGlimmerForCausalLM", MuseGlimmerPreTrainedModel, MuseGlimmerTextModel, MuseGlimmerTextConfig, _capped
)
OF_EXPERTS = [
    rule for rule in get_checkpoint_conversion_mapping("step3p7") if "model." not in str(rule.target_patterns)
]
register_checkpoint_conversion_mapping("step3p5", OF_EXPERTS, overwrite=True)
