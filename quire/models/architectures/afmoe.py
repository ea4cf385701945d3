"""AFMoE (Arcee's Trinity): gated attention, norms before and after each branch, and many small experts."""

from dataclasses import replace

from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count, layer_windows


def afmoe(config: HfConfig) -> DecoderSpec:
    """Three of four layers have a window. Only these have a rotary embedding."""
    config = {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 1024, **config}
    norm = NormSpec("rms", config["rms_norm_eps"], wide=True)
    every = config.get("global_attn_every_n_layers") or 4
    windows = layer_windows(config, lambda i: (i + 1) % every != 0)
    bias = bool(config.get("attention_bias", False))
    attention = {"qkv_bias": bias, "output_bias": bias, "qk_norm": norm, "output_gate": "separate"}
    spec = decoder_spec(config, attention=attention, norm=norm)
    return replace(
        spec,
        mlps=_mlps(config),
        windows=windows,
        rotary=tuple(r if window else None for r, window in zip(spec.rotary, windows, strict=True)),
        embedding_scale=config["hidden_size"] ** 0.5 if config.get("mup_enabled") else None,
        names={**spec.names, **NAMES["deepseek_moe"], **NAMES["afmoe"]},
    )


def _mlps(config: HfConfig) -> tuple[MLPSpec | MoESpec, ...]:
    act = config.get("hidden_act", "silu")
    size = config["moe_intermediate_size"]
    shared = config.get("num_shared_experts", 2)
    experts = MoESpec(
        expert_count(config),
        config.get("num_experts_per_tok", 6),
        size,
        act,
        scoring="sigmoid",
        scale=config.get("route_scale", 1.0),
        correction_bias=True,
        shared=MLPSpec(size * shared, act) if shared else None,
    )
    dense = config.get("num_dense_layers", 1)
    return tuple(
        MLPSpec(config["intermediate_size"], act) if i < dense else experts for i in range(config["num_hidden_layers"])
    )
