"""Nemotron-3 and 4, and Minitron: layer norms that store weight - 1, and squared ReLUs without a gate."""

from dataclasses import replace

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.architectures.qwen import COSMOS3_GENERATOR
from quire.models.spec import DecoderSpec, HfConfig, decoder_spec


def nemotron(config: HfConfig) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    config = {"partial_rotary_factor": 0.5, **config}
    norm = NormSpec("layer", config.get("norm_eps", 1e-5), bias=True, offset=1.0)
    mlp = MLPSpec(config["intermediate_size"], config.get("hidden_act", "relu2"), gated=False, bias=mlp_bias)
    return decoder_spec(config, attention={"qkv_bias": bias, "output_bias": bias}, mlp=mlp, norm=norm)


def cosmos3_edge(config: HfConfig) -> DecoderSpec:
    """The text model of Cosmos 3 Edge, with RMS norms and rotation of whole heads."""
    bias = bool(config.get("attention_bias", False))
    act = config.get("hidden_act", "relu2")
    mlp = MLPSpec(config["intermediate_size"], act, gated=False, bias=bool(config.get("mlp_bias", False)))
    own = {
        role: f"model.layers.{{i}}.self_attn.to_{part}"
        for role, part in zip("qkvo", ("q", "k", "v", "out"), strict=True)
    }
    spec = decoder_spec(config, attention={"qkv_bias": bias, "output_bias": bias}, mlp=mlp, names=own)
    return replace(spec, ignored=(*spec.ignored, *COSMOS3_GENERATOR))
