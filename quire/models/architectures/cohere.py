"""Cohere's Command-R and Command-R7B: parallel branches, layer norms without bias, rotation of neighbouring pairs."""

from dataclasses import replace

from quire.layers.specs import NormSpec
from quire.models.spec import DecoderSpec, HfConfig, decoder_spec, layer_windows


def cohere(config: HfConfig) -> DecoderSpec:
    norm = NormSpec("layer", config.get("layer_norm_eps", 1e-5))
    bias = bool(config.get("attention_bias", False))
    attention = {
        "qkv_bias": bias,
        "output_bias": bias,
        "interleaved_rotary": True,
        "qk_norm_over": "heads",
        "qk_norm": norm if config.get("use_qk_norm") else None,
    }
    return decoder_spec(
        {"tie_word_embeddings": True, **config},
        attention=attention,
        norm=norm,
        residual="parallel",
        names={"mlp_norm": None},
        logit_scale=config.get("logit_scale", 0.0625),
    )


def cohere2(config: HfConfig) -> DecoderSpec:
    """Three of four layers have a window. The fourth attends to all tokens and has no rotary embedding."""
    pattern = config.get("sliding_window_pattern") or 4
    windows = layer_windows({"sliding_window": 4096, **config}, lambda i: (i + 1) % pattern != 0)
    spec = cohere(config)
    rotary = tuple(None if w is None else r for r, w in zip(spec.rotary, windows, strict=True))
    return replace(spec, windows=windows, rotary=rotary)
