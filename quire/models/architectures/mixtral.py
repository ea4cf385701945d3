"""Mixtral: Mistral with eight experts in every layer."""

from quire.layers.specs import MoESpec
from quire.models.spec import DecoderSpec, HfConfig, decoder_spec, expert_count, layer_windows


def mixtral(config: HfConfig) -> DecoderSpec:
    layer = "model.layers.{i}.block_sparse_moe."
    names = {"router": layer + "gate"}
    names |= {f"expert_{k}": f"{layer}experts.{{e}}.{w}" for k, w in (("gate", "w1"), ("down", "w2"), ("up", "w3"))}
    chosen = config.get("num_experts_per_tok", 2)
    mlp = MoESpec(expert_count(config), chosen, config["intermediate_size"], config.get("hidden_act", "silu"))
    return decoder_spec(config, mlp=mlp, names=names, windows=layer_windows(config))
