"""MiMo-V2-Flash and MiMo-V2.5: values that are shorter than keys, and the experts of DeepSeek-V3."""

from dataclasses import replace

from quire.layers.attention_spec import AttentionSpec
from quire.layers.rotary_spec import RotarySpec, rotary_spec
from quire.layers.specs import NormSpec
from quire.models.architectures.deepseek import mixtures
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec


def mimo_v2(config: HfConfig) -> DecoderSpec:
    """MiMo-V2.5: q, k and v may be in one tensor, whose quantized form is not supported."""
    if config.get("attention_projection_layout") != "fused_qkv":
        return mimo_v2_flash(config)
    if config.get("quantization_config"):
        raise ValueError("attention_projection_layout='fused_qkv' with quantization_config is not supported")
    spec = mimo_v2_flash(config)
    mixers = tuple(replace(m, qkv_layout="concatenated") for m in spec.mixers if isinstance(m, AttentionSpec))
    return replace(spec, mixers=mixers, names={**spec.names, "qkv": "model.layers.{i}.self_attn.qkv_proj"})


def mimo_v2_flash(config: HfConfig) -> DecoderSpec:
    """Most layers have a window, twice as many KV heads, and sinks. The first checkpoints have other field names than
    transformers."""
    eps = config.get("layernorm_epsilon", 1e-5)
    config = {"head_dim": 192, "v_head_dim": 128, "rms_norm_eps": eps, "intermediate_size": 0, **config}
    layers = config["num_hidden_layers"]
    pattern = config.get("hybrid_layer_pattern") or [0 if i == 0 or (i + 1) % 6 == 0 else 1 for i in range(layers)]
    kinds = config.get("layer_types") or ["sliding_attention" if slides else "full_attention" for slides in pattern]
    freq = config.get("moe_layer_freq")
    if not config.get("mlp_layer_types"):
        sparse = freq if isinstance(freq, list) else [i > 0 for i in range(layers)]
        config = {**config, "mlp_layer_types": ["sparse" if has else "dense" for has in sparse]}
    if config.get("sliding_window_size") is not None:
        window = config["sliding_window_size"] + 1
    else:
        window = config.get("sliding_window", 129)
    full = AttentionSpec(
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        bool(config.get("attention_bias", False)),
        value_dim=config["v_head_dim"],
        value_scale=config.get("attention_value_scale") or 1.0,
    )
    kv_heads = config.get("swa_num_key_value_heads") or 2 * full.num_kv_heads
    sliding = replace(full, num_kv_heads=kv_heads, sinks=True)
    rotary = {kind: _rotary(config, kind) for kind in set(kinds)}
    return decoder_spec(
        config,
        mixer=tuple(full if kind == "full_attention" else sliding for kind in kinds),
        mlp=mixtures({"moe_layer_freq": 1, **config, "n_shared_experts": None}, is_v3=True),
        norm=NormSpec("rms", config["rms_norm_eps"]),
        rotary=tuple(rotary[kind] for kind in kinds),
        windows=tuple(None if kind == "full_attention" else window for kind in kinds),
        names=NAMES["deepseek_moe"] | {"sinks": "model.layers.{i}.self_attn.attention_sink_bias"},
        ignored=(r"rotary_emb\.inv_freq$", r"^model\.mtp\."),
    )


def _rotary(config: HfConfig, kind: str) -> RotarySpec:
    theta = config.get("swa_rope_theta", 1e4) if kind == "sliding_attention" else config.get("rope_theta", 5e6)
    if config.get("rope_parameters"):
        return rotary_spec(config, config["head_dim"], kind)
    return rotary_spec({"partial_rotary_factor": 0.334, **config, "rope_theta": theta}, config["head_dim"])
