"""Persimmon: GPT-NeoX with sequential branches, squared ReLUs, and layer norms of queries and keys."""

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec


def persimmon(config: HfConfig) -> DecoderSpec:
    norm = NormSpec("layer", config.get("layer_norm_eps", 1e-5), bias=True)
    mlp = MLPSpec(config["intermediate_size"], config.get("hidden_act", "relu2"), gated=False, bias=True)
    attention = {
        "qkv_layout": "by_kv_head",
        "qkv_bias": True,
        "output_bias": True,
        "qk_norm": norm if config.get("qk_layernorm", True) else None,
    }
    config = {"partial_rotary_factor": 0.5, **config}
    return decoder_spec(config, attention=attention, mlp=mlp, norm=norm, names=NAMES["persimmon"])
