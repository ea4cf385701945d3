"""Cohere's Command-R, Command-R7B and their successors with experts: parallel branches, layer norms without bias,
rotation of neighbouring pairs."""

from dataclasses import replace

from quire.layers.rotary_spec import rotary_spec
from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count, layer_windows


def cohere(config: HfConfig, interleaved: bool = True) -> DecoderSpec:
    norm = NormSpec("layer", config.get("layer_norm_eps", 1e-5))
    bias = bool(config.get("attention_bias", False))
    attention = {
        "qkv_bias": bias,
        "output_bias": bias,
        "interleaved_rotary": interleaved,
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


def cohere_compass(config: HfConfig) -> DecoderSpec:
    """The text model of North Vision: without rotation of neighbouring pairs. Each kind of layer has its own rotary
    parameters, or none."""
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    parameters = config["rope_parameters"]
    spec = cohere({**config, "rope_parameters": None}, interleaved=False)
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return replace(
        spec,
        windows=layer_windows({**config, "layer_types": kinds}),
        rotary=tuple(rotary_spec(config, head_dim, kind) if parameters[kind] else None for kind in kinds),
        logit_scale=config.get("logit_scale"),
    )


def cohere2(config: HfConfig) -> DecoderSpec:
    """Three of four layers have a window. The fourth attends to all tokens and has no rotary embedding."""
    pattern = config.get("sliding_window_pattern") or 4
    windows = layer_windows({"sliding_window": 4096, **config}, lambda i: (i + 1) % pattern != 0)
    spec = cohere(config)
    rotary = tuple(None if w is None else r for r, w in zip(spec.rotary, windows, strict=True))
    return replace(spec, windows=windows, rotary=rotary)


def cohere2_moe(config: HfConfig) -> DecoderSpec:
    """Cohere2 with experts. The first layers may be dense, with attention to all tokens and a rotary embedding."""
    layers = config["num_hidden_layers"]
    first = config.get("first_k_dense_replace", 0)
    kinds = config.get("mlp_layer_types") or ["dense" if i < first else "sparse" for i in range(layers)]
    every = config.get("prefix_dense_sliding_window_pattern") or 1
    later = config.get("sliding_window_pattern") or 4

    def slides(i: int) -> bool:
        return bool((i + 1) % every if i < first else (i - first + 1) % later)

    config = {"head_dim": 128, "sliding_window": 4096, **config}
    windows = layer_windows(config, slides)
    spec = cohere(config)
    size = config.get("prefix_dense_intermediate_size") or config["intermediate_size"]
    dense = MLPSpec(size, config.get("hidden_act", "silu"))
    rotated = [window is not None or (kinds[i] == "dense" and every == 1) for i, window in enumerate(windows)]
    eps = config.get("rms_norm_eps")
    return replace(
        spec,
        windows=windows,
        mlps=tuple(dense if kind == "dense" else _experts(config) for kind in kinds),
        rotary=tuple(r if rotates else None for r, rotates in zip(spec.rotary, rotated, strict=True)),
        norm=spec.norm if eps is None else NormSpec("rms", eps),
        names={**NAMES["deepseek_moe"], **spec.names},
    )


def _experts(config: HfConfig) -> MoESpec:
    act = config.get("hidden_act", "silu")
    size = config["intermediate_size"]
    shared = config.get("num_shared_experts", 0)
    average = shared and config.get("shared_expert_combination_strategy", "average") == "average"
    scoring = config.get("expert_selection_fn", "softmax")
    return MoESpec(
        expert_count(config),
        config.get("num_experts_per_tok", 2),
        size,
        act,
        scoring=scoring,
        normalize=scoring == "softmax" or bool(config.get("norm_topk_prob", True)),
        scale=0.5 if average else 1.0,
        shared=MLPSpec(size * shared, act, multipliers=(1.0, 0.5 if average else 1.0)) if shared else None,
    )
