"""Phi-1, 1.5 and 2 (parallel branches), and Phi-3 and 4 (Llama with fused projections)."""

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, layer_windows


def phi(config: HfConfig) -> DecoderSpec:
    norm = NormSpec("layer", config.get("layer_norm_eps", 1e-5), bias=True)
    qk_norm = norm if config.get("qk_layernorm") else None
    mlp = MLPSpec(config["intermediate_size"], config.get("hidden_act", "gelu_new"), gated=False, bias=True)
    return decoder_spec(
        {"partial_rotary_factor": 0.5, **config}, attention={"qkv_bias": True, "output_bias": True, "qk_norm": qk_norm},
        mlp=mlp, norm=norm, names=NAMES["phi"], residual="parallel", lm_head_bias=True,
    )  # fmt: skip


def phi3(config: HfConfig) -> DecoderSpec:
    attention, windows = {"qkv_layout": "concatenated"}, layer_windows(config)
    return decoder_spec(config, attention=attention, names=NAMES["phi3"], windows=windows)
