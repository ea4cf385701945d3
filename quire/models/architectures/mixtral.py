"""Mixtral: Mistral with eight experts in every layer."""

from quire.layers.specs import MoESpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count, layer_windows


def mixtral(config: HfConfig) -> DecoderSpec:
    chosen = config.get("num_experts_per_tok", 2)
    mlp = MoESpec(expert_count(config), chosen, config["intermediate_size"], config.get("hidden_act", "silu"))
    return decoder_spec(config, mlp=mlp, names=NAMES["mixtral"], windows=layer_windows(config))
