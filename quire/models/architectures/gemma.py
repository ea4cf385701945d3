"""Gemma 1, 2, 3 and 4 (text): embeddings scaled by sqrt(hidden_size). The norms of the first three store weight - 1."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from quire.layers.attention_spec import AttentionSpec
from quire.layers.rotary_spec import rotary_spec
from quire.layers.specs import AltUpSpec, MLPSpec, MoESpec, NormSpec, PerLayerSpec
from quire.models.spec import (
    NAMES,
    Architecture,
    DecoderSpec,
    HfConfig,
    decoder_spec,
    expert_count,
    layer_windows,
    rotary_by_window,
)
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


def rnj1(config: HfConfig) -> DecoderSpec:
    """Rnj-1: Gemma 3 with full attention in all layers."""
    if "chunked_attention" in (config.get("layer_types") or ()):
        raise ValueError("layer_types with chunked_attention is not supported in a Rnj-1")
    kinds = ["full_attention"] * config["num_hidden_layers"]
    return gemma3({"layer_types": kinds, **config, "attn_logit_softcapping": None})


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


def paligemma(config: HfConfig) -> DecoderSpec:
    """PaliGemma 1 and 2. The latter's windows are the limit of its texts, whose tokens see each other."""
    text = {"tie_word_embeddings": True, **config["text_config"]}
    spec = gemma2(text) if text.get("model_type") == "gemma2" else gemma(text)
    windows = [window for window in spec.windows if window is not None]
    ignored = r"^(model\.)?vision_tower\.(vision_model\.)?head\."
    return replace(
        spec,
        windows=(None,) * spec.num_layers,
        max_positions=min([spec.max_positions, *windows]),
        media=MediaSpec("paligemma", config, two_way=True),
        ignored=(*spec.ignored, ignored),
    )


_GEMMA4 = {
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}


def gemma4(config: HfConfig) -> DecoderSpec:
    """Gemma 4: layers with full attention have larger heads, whose values may be their keys. In small models, tokens
    have embeddings for each layer, and the last layers read the keys and values of earlier ones."""
    config = {**_GEMMA4, **{name: value for name, value in config.items() if value is not None}}
    if config.get("use_bidirectional_attention") == "all":
        raise ValueError("a Gemma 4 that is an encoder is not supported")
    layers = config["num_hidden_layers"]
    kinds = list(config.get("layer_types") or [])
    kinds = kinds or ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers)]
    kinds[-1] = "full_attention"
    mixers = _gemma4_mixers(config, kinds)
    own = config["hidden_size_per_layer_input"]
    act = config["hidden_activation"]
    size = config["intermediate_size"]
    factor = 2 if config.get("use_double_wide_mlp") else 1
    narrow, wide = (_gemma4_mlp(config, MLPSpec(size * n, act)) for n in (1, factor))
    dims = {kind: mixer.head_dim for kind, mixer in zip(kinds, mixers, strict=True)}
    rotary = {kind: rotary_spec(config, dim, kind) for kind, dim in dims.items()}
    return decoder_spec(
        config,
        mixer=tuple(mixers),
        mlp=tuple(narrow if mixer.source is None else wide for mixer in mixers),
        norm=NormSpec("rms", config["rms_norm_eps"], wide=True),
        rotary=tuple(rotary[kind] for kind in kinds),
        windows=tuple(config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds),
        embedding_scale=config["hidden_size"] ** 0.5,
        logit_soft_cap=config.get("final_logit_softcapping"),
        names=NAMES["sandwich_norms"] | NAMES["gemma4"],
        residual="scaled",
        ignored=(r"rotary_emb\.inv_freq$", *_unused(mixers)),
        per_layer=PerLayerSpec(
            own, config.get("vocab_size_per_layer_input") or config["vocab_size"], act, config.get("pad_token_id", 0)
        )
        if own
        else None,
    )


def _gemma4_mlp(config: HfConfig, dense: MLPSpec) -> MLPSpec | MoESpec:
    if not config.get("enable_moe_block"):
        return dense
    return MoESpec(
        expert_count(config),
        config["top_k_experts"],
        config["moe_intermediate_size"],
        dense.activation,
        shared=dense,
        layout="stacked",
        apart=True,
    )


def _gemma4_mixers(config: HfConfig, kinds: list[str]) -> list[AttentionSpec]:
    layers = len(kinds)
    bias = bool(config.get("attention_bias", False))
    norm = NormSpec("rms", config["rms_norm_eps"], wide=True)
    keys_only = bool(config.get("attention_k_eq_v", False))
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    wide = {"head_dim": config["global_head_dim"]}
    if keys_only and config.get("num_global_key_value_heads"):
        wide["num_key_value_heads"] = config["num_global_key_value_heads"]
    saved = config.get("per_layer_config")  # of transformers
    first = layers - config.get("num_kv_shared_layers", 0)
    mixers = []
    for i, kind in enumerate(kinds):
        is_full = kind == "full_attention"
        own = (saved.get(str(i)) or {}) if saved is not None else wide if is_full else {}
        mixers.append(
            AttentionSpec(
                config["hidden_size"],
                heads,
                own.get("num_key_value_heads") or kv_heads,
                own.get("head_dim") or config["head_dim"],
                bias,
                bias,
                qk_norm=norm,
                scale=1.0,
                value_norm=NormSpec("rms", config["rms_norm_eps"], affine=False),
                values_are_keys=keys_only and is_full,
                source=None if i < first else max(j for j in range(first) if kinds[j] == kind),
                looks_ahead=not (is_full and config.get("use_bidirectional_attention") == "vision"),
            )
        )
    return mixers


def gemma4_multimodal(config: HfConfig) -> DecoderSpec:
    """Gemma 4 with images and audio, if transformers is installed, whose code encodes them. Otherwise, this is the text
    model. In large models, tokens of an image see each other in layers with a window."""
    spec = _text_model(config, gemma4)
    if find_spec("transformers") is None or not (config.get("vision_config") or config.get("audio_config")):
        return spec
    two_way = config["text_config"].get("use_bidirectional_attention") == "vision"
    if two_way and any(mixer.source is not None for mixer in spec.mixers if isinstance(mixer, AttentionSpec)):
        raise ValueError("layers that share keys, and images whose tokens see each other, exclude each other")
    return replace(spec, media=MediaSpec("transformers", config, two_way=two_way))


_GEMMA3N = {
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 15,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "final_logit_softcapping": 30.0,
}


def gemma3n(config: HfConfig) -> DecoderSpec:
    """Gemma 3n: several residual streams, embeddings of tokens for each layer, and sparse gates in the first layers."""
    config = {**_GEMMA3N, **config}
    if config.get("altup_active_idx", 0):
        raise ValueError("a Gemma 3n with altup_active_idx other than 0 is not supported")
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [
        "sliding_attention" if (i + 1) % 5 else "full_attention" for i in range(layers)
    ]
    mixers = _gemma4_mixers({**config, "global_head_dim": config["head_dim"]}, list(kinds))
    sizes = config["intermediate_size"]
    sizes = sizes if isinstance(sizes, list) else [sizes] * layers
    sparse = 10 if layers > 10 else 0
    shares = config.get("activation_sparsity_pattern")
    shares = [0.95] * sparse + [0.0] * (layers - sparse) if shares is None else shares
    act = config["hidden_activation"]
    windows = layer_windows({**config, "layer_types": kinds})
    return decoder_spec(
        {**config, "intermediate_size": sizes[0]},
        mixer=tuple(mixers),
        mlp=tuple(MLPSpec(size, act, sparsity=share) for size, share in zip(sizes, shares, strict=True)),
        norm=NormSpec("rms", config["rms_norm_eps"], wide=True),
        rotary=rotary_by_window(config, windows),
        windows=windows,
        embedding_scale=config["hidden_size"] ** 0.5,
        logit_soft_cap=config["final_logit_softcapping"],
        names=NAMES["sandwich_norms"] | NAMES["gemma4"] | NAMES["gemma3n"],
        residual="altup",
        ignored=(r"rotary_emb\.inv_freq$", *_unused(mixers)),
        per_layer=PerLayerSpec(config["hidden_size_per_layer_input"], config["vocab_size_per_layer_input"], act),
        altup=AltUpSpec(
            config.get("altup_num_inputs", 4),
            bool(config.get("altup_correct_scale", True)),
            config.get("laurel_rank", 64),
        ),
    )


def gemma3n_multimodal(config: HfConfig) -> DecoderSpec:
    """The text model of a published Gemma 3n checkpoint. The weights of its towers are ignored."""
    return _text_model(config, gemma3n)


def _text_model(config: HfConfig, architecture: Architecture) -> DecoderSpec:
    shared = {k: config[k] for k in ("tie_word_embeddings",) if k in config}
    spec = architecture({**shared, **config["text_config"]})
    ignored = r"^(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio|multi_modal_projector)\."
    return replace(spec, ignored=(*spec.ignored, ignored))


def _unused(mixers: list[AttentionSpec]) -> tuple[str, ...]:
    """Return patterns of the keys and values that checkpoints have in layers that read those of others."""
    readers = "|".join(str(i) for i, mixer in enumerate(mixers) if mixer.source is not None)
    return (rf"\.layers\.({readers})\.self_attn\.[kv]_(proj|norm)\.",) if readers else ()
