"""Phi-1, 1.5 and 2 (parallel branches), Phi-3 and 4 (Llama with fused projections), and Phi-3.5-MoE."""

from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count, layer_windows


def phi(config: HfConfig) -> DecoderSpec:
    norm = NormSpec("layer", config.get("layer_norm_eps", 1e-5), bias=True)
    qk_norm = norm if config.get("qk_layernorm") else None
    mlp = MLPSpec(config["intermediate_size"], config.get("hidden_act", "gelu_new"), gated=False, bias=True)
    return decoder_spec(
        {"partial_rotary_factor": 0.5, **config},
        attention={"qkv_bias": True, "output_bias": True, "qk_norm": qk_norm},
        mlp=mlp,
        norm=norm,
        names=NAMES["phi"],
        residual="parallel",
        lm_head_bias=True,
    )


def phi3(config: HfConfig) -> DecoderSpec:
    attention = {"qkv_layout": "concatenated"}
    windows = layer_windows(config)
    return decoder_spec(config, attention=attention, names=NAMES["phi3"], windows=windows)


def phimoe(config: HfConfig) -> DecoderSpec:
    """Two experts for each token, chosen one after the other."""
    bias = bool(config.get("attention_bias", False))
    norm = NormSpec("layer", config.get("rms_norm_eps", 1e-5), bias=True)
    mlp = MoESpec(
        expert_count(config),
        2,
        config["intermediate_size"],
        config.get("hidden_act", "silu"),
        scoring="sparse_mixer",
        jitter=config.get("router_jitter_noise", 0.01),
    )
    return decoder_spec(
        config,
        attention={"qkv_bias": bias, "output_bias": bias},
        mlp=mlp,
        norm=norm,
        names=NAMES["mixtral"],
        windows=layer_windows(config),
        lm_head_bias=bool(config.get("lm_head_bias", False)),
    )
