"""Granite with experts, and with sliding windows. llama.py has the first Granite, and mamba.py the hybrid."""

from dataclasses import replace

from quire.layers.attention_spec import AttentionSpec
from quire.layers.specs import MLPSpec, MoESpec
from quire.models.architectures.llama import granite
from quire.models.spec import NAMES, DecoderSpec, HfConfig, expert_count, layer_windows

_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")


def granite_moe(config: HfConfig) -> DecoderSpec:
    """Granite 3 with experts in every layer. GraniteMoeShared has a shared expert, too."""
    spec = granite({**dict.fromkeys(_MULTIPLIERS, 1.0), **config})
    act = config.get("hidden_act", "silu")
    shared = config.get("shared_intermediate_size")
    experts = MoESpec(
        expert_count(config),
        config.get("num_experts_per_tok", 2),
        config["intermediate_size"],
        act,
        shared=MLPSpec(shared, act) if shared else None,
        layout="stacked",
    )
    return replace(spec, mlps=(experts,) * spec.num_layers, names={**spec.names, **NAMES["granite_hybrid"]})


def granite_swa(config: HfConfig) -> DecoderSpec:
    """Granite with sinks. Three of four layers have a window, and each layer has its own rotary base or none."""
    return _with_windows(granite({**dict.fromkeys(_MULTIPLIERS, 1.0), **config}), config)


def granite_moe_swa(config: HfConfig) -> DecoderSpec:
    spec = _with_windows(granite_moe(config), config)
    return replace(spec, names={**spec.names, **NAMES["granite_moe_swa"]})


def _with_windows(spec: DecoderSpec, config: HfConfig) -> DecoderSpec:
    thetas = config.get("layer_rope_theta") or [r and r.theta for r in spec.rotary]
    rotary = (
        replace(r, theta=float(theta)) if r and theta else None for r, theta in zip(spec.rotary, thetas, strict=True)
    )
    return replace(
        spec,
        mixers=tuple(replace(mixer, sinks=True) for mixer in spec.mixers if isinstance(mixer, AttentionSpec)),
        windows=layer_windows({"sliding_window": 128, **config}, lambda i: i % 4 != 0),
        rotary=tuple(rotary),
        names={**spec.names, "sinks": NAMES["gpt_oss"]["sinks"]},
    )
