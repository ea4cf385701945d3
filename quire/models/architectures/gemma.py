"""Gemma 1, 2 and 3 (text): norms that keep weight - 1, embeddings scaled by sqrt(hidden_size)."""

from dataclasses import replace
from typing import Any

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, layer_windows, rotary_by_window
from quire.multimodal.spec import MediaSpec

_GEMMA3 = {  # defaults of fields that the config does not have
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def _norm(config: HfConfig) -> NormSpec:
    return NormSpec("rms", config.get("rms_norm_eps", 1e-6), wide=True, offset=1.0)


def gemma(config: HfConfig, **differences: Any) -> DecoderSpec:
    config = {"head_dim": 256, "tie_word_embeddings": True, **config}
    bias = bool(config.get("attention_bias", False))
    act = config.get("hidden_activation") or "gelu_pytorch_tanh"  # the first configs have gelu in hidden_act by mistake
    attention = {"qkv_bias": bias, "output_bias": bias, **differences.pop("attention", {})}
    return decoder_spec(
        config,
        attention=attention,
        mlp=MLPSpec(config["intermediate_size"], act),
        norm=_norm(config),
        embedding_scale=config["hidden_size"] ** 0.5,
        **differences,
    )


def gemma2(config: HfConfig) -> DecoderSpec:
    """Gemma 2: norms before and after each branch, soft caps, a window in every other layer."""
    config = {"sliding_window": 4096, **config}
    scale = config.get("query_pre_attn_scalar", 256) ** -0.5
    return gemma(
        config,
        attention={"scale": scale, "soft_cap": config.get("attn_logit_softcapping", 50.0)},
        logit_soft_cap=config.get("final_logit_softcapping", 30.0),
        names=NAMES["sandwich_norms"],
        windows=layer_windows(config, lambda i: i % 2 == 0),
    )


def gemma3(config: HfConfig) -> DecoderSpec:
    """Gemma 3: norms of q and k instead of soft caps. Of six layers, five have a window and another rotary base."""
    config = {**_GEMMA3, "head_dim": 256, **config}
    pattern = config.get("sliding_window_pattern") or 6
    windows = layer_windows(config, lambda i: (i + 1) % pattern != 0)
    attention = {
        "scale": config["query_pre_attn_scalar"] ** -0.5,
        "qk_norm": _norm(config),
        "soft_cap": config.get("attn_logit_softcapping"),
    }
    rotary = rotary_by_window(config, windows)
    if config.get("use_bidirectional_attention"):  # EmbeddingGemma, whose windows are half before and half after
        attention["is_causal"] = False
        windows = tuple(None if window is None else window // 2 for window in windows)
    return gemma(
        config,
        attention=attention,
        names=NAMES["sandwich_norms"],
        windows=windows,
        rotary=rotary,
        logit_soft_cap=config.get("final_logit_softcapping"),
    )


def gemma3_multimodal(config: HfConfig) -> DecoderSpec:
    """Gemma 3 with image input, if its config describes the vision model. Otherwise, this is the text model, and the
    weights of a vision tower are ignored."""
    shared = {k: config[k] for k in ("tie_word_embeddings",) if k in config}
    spec = gemma3({**shared, **config["text_config"]})
    media = None
    vision = config.get("vision_config")
    if vision:
        media = MediaSpec("gemma3", config, two_way=True)
        count = config.get("mm_tokens_per_image", 256)
        if any(window is not None and window < count for window in spec.windows):
            raise ValueError(
                f"sliding_window={min(filter(None, spec.windows))} is less than the {count} tokens of a "
                "picture, which see each other"
            )
    return replace(spec, media=media, ignored=(*spec.ignored, r"^(model\.)?(vision_tower|multi_modal_projector)\."))
