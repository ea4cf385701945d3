"""Llama 4: every fourth layer attends to all tokens, without rotation; the others within chunks. Each token uses one
expert."""

from dataclasses import replace
from typing import Any

from quire.layers.attention_spec import AttentionSpec, Temperature
from quire.layers.rotary_spec import rotary_spec
from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count


def llama4(config: HfConfig, **differences: Any) -> DecoderSpec:
    """Norms of queries and keys have no weights. Layers without rotation scale up their queries in long texts.

    Raises ValueError for more than one expert per token, which no published model has.
    """
    config = {"head_dim": 128, "rms_norm_eps": 1e-5, **config}
    layers = config["num_hidden_layers"]
    interval = config.get("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]
    heads = config["num_attention_heads"]
    bias = bool(config.get("attention_bias", False))
    norm = NormSpec("rms", config["rms_norm_eps"], affine=False) if config.get("use_qk_norm", True) else None
    local = AttentionSpec(
        config["hidden_size"],
        heads,
        config.get("num_key_value_heads") or heads,
        config["head_dim"],
        bias,
        bias,
        qk_norm=norm,
        norm_after_rotary=True,
        interleaved_rotary=True,
    )
    scale = config.get("attn_scale", 0.1)
    length = config.get("floor_scale", 8192)
    sharper = Temperature(scale, length, offset=1) if config.get("attn_temperature_tuning", True) else None
    everywhere = replace(local, qk_norm=None, norm_after_rotary=False, temperature=sharper)
    rotary = rotary_spec(config, config["head_dim"])
    return decoder_spec(
        config,
        mixer=tuple(local if rotates else everywhere for rotates in rotated),
        mlp=_mlps(config),
        rotary=tuple(rotary if rotates else None for rotates in rotated),
        names=NAMES["llama4"],
        chunks=tuple(config.get("attention_chunk_size", 8192) if rotates else None for rotates in rotated),
        **differences,
    )


def llama4_multimodal(config: HfConfig) -> DecoderSpec:
    """The text model of a published Llama 4 checkpoint. The weights of its vision tower are ignored."""
    spec = llama4(config["text_config"], ignored=(r"^(vision_model|multi_modal_projector)\.",))
    names = {role: name and f"language_model.{name}" for role, name in spec.names.items()}
    return replace(spec, names=names)


def _mlps(config: HfConfig) -> tuple[MLPSpec | MoESpec, ...]:
    act = config.get("hidden_act", "silu")
    layers = config["num_hidden_layers"]
    if (chosen := config.get("num_experts_per_tok", 1)) != 1:
        raise ValueError(f"num_experts_per_tok={chosen}: Llama 4 is supported with one expert a token")
    size = config["intermediate_size"]
    experts = MoESpec(
        expert_count(config),
        1,
        size,
        act,
        scoring="sigmoid",
        normalize=False,
        shared=MLPSpec(size, act),
        layout="fused_halves",
        weigh_inputs=True,
    )
    dense = MLPSpec(config.get("intermediate_size_mlp", 16384), act)
    step = config.get("interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers")
    sparse = range(step - 1, layers, step) if sparse is None else sparse
    return tuple(experts if i in sparse else dense for i in range(layers))
