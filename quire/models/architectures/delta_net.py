"""Models with the gated delta rule in most layers: Qwen3-Next, Qwen3.5, OLMo Hybrid and Kimi Linear."""

from dataclasses import replace
from typing import Any, Literal

from quire.layers.attention_spec import LatentAttentionSpec
from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.layers.state_spec import DeltaSpec
from quire.models.architectures.olmo import olmo2
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count

_QWEN = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DRAFT_LAYERS = r"^mtp\."  # a layer that predicts further tokens, which heads/mtp.py reads


def _has_attention(config: HfConfig) -> list[bool]:
    interval = config["full_attention_interval"]
    kinds = config.get("layer_types")
    layers = config["num_hidden_layers"]
    return [(k == "full_attention") for k in kinds] if kinds else [(i + 1) % interval == 0 for i in range(layers)]


def _qwen(
    config: HfConfig, mlp: MLPSpec | tuple[MLPSpec | MoESpec, ...], projections: Literal["by_key_head", "separate"]
) -> DecoderSpec:
    """Three of four layers have a Gated DeltaNet. The others have attention with a gated output."""
    eps = config.get("rms_norm_eps", 1e-6)
    bias = bool(config.get("attention_bias", False))
    norm = NormSpec("rms", eps, wide=True, offset=1.0)
    attention = {"qkv_bias": bias, "output_bias": bias, "qk_norm": norm, "output_gate": True}
    names = NAMES["qwen_moe"] | NAMES["delta_net"]
    spec = decoder_spec(config, attention=attention, mlp=mlp, norm=norm, names=names)
    delta = DeltaSpec(
        config["hidden_size"],
        config["linear_num_value_heads"],
        config["linear_num_key_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        config["linear_conv_kernel_dim"],
        NormSpec("rms", eps),
        projections,
    )
    pairs = zip(spec.mixers, _has_attention(config), strict=True)
    return replace(
        spec, mixers=tuple(mixer if full else delta for mixer, full in pairs), ignored=(*spec.ignored, _DRAFT_LAYERS)
    )


def _experts(config: HfConfig, layout: Literal["separate", "stacked"]) -> tuple[MLPSpec | MoESpec, ...]:
    act = config.get("hidden_act", "silu")
    step = config.get("decoder_sparse_step", 1)
    experts = MoESpec(
        expert_count(config),
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        act,
        normalize=bool(config.get("norm_topk_prob", True)),
        shared=MLPSpec(config["shared_expert_intermediate_size"], act),
        shared_gate=True,
        layout=layout,
    )
    dense = MLPSpec(config.get("intermediate_size") or 0, act)
    always = config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    return tuple(experts if (i + 1) % step == 0 and i not in always else dense for i in layers)


def qwen3_next(config: HfConfig) -> DecoderSpec:
    config = {**_QWEN, **config}
    return _qwen(config, _experts(config, "separate"), "by_key_head")


def qwen3_5(config: HfConfig) -> DecoderSpec:
    config = {**_QWEN, **config}
    return _qwen(config, MLPSpec(config["intermediate_size"], config.get("hidden_act", "silu")), "separate")


def qwen3_5_moe(config: HfConfig) -> DecoderSpec:
    config = {**_QWEN, **config}
    return _qwen(config, _experts(config, "stacked"), "separate")


def olmo_hybrid(config: HfConfig) -> DecoderSpec:
    """OLMo-3 with a Gated DeltaNet in most layers. Only these have norms before their branches instead of after."""
    hidden = config["hidden_size"]
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    attends = [kind == "full_attention" for kind in kinds] if kinds else [i % 4 == 3 for i in range(layers)]
    rope = config.get("rope_parameters") or {}
    has_rotary = bool(rope.get("rope_theta") or config.get("rope_theta"))
    spec = olmo2({"rms_norm_eps": 1e-6, **config}, **({} if has_rotary else {"rotary": None}))
    key_heads = config.get("linear_num_key_heads") or config["num_attention_heads"]
    key_dim = config.get("linear_key_head_dim") or int(0.75 * hidden / key_heads)
    delta = DeltaSpec(
        hidden,
        config.get("linear_num_value_heads") or config["num_attention_heads"],
        key_heads,
        key_dim,
        config.get("linear_value_head_dim") or 2 * key_dim,
        config.get("linear_conv_kernel_dim", 4),
        NormSpec("rms", 1e-5),
        step_scale=2.0 if config.get("linear_allow_neg_eigval", True) else 1.0,
    )
    names = NAMES["olmo_hybrid"]
    return replace(
        spec,
        mixers=tuple(mixer if full else delta for mixer, full in zip(spec.mixers, attends, strict=True)),
        names={**spec.names, **names},
        layer_names={i: NAMES["olmo_hybrid_delta"] for i in range(layers) if not attends[i]},
    )


def kimi_linear(config: HfConfig) -> DecoderSpec:
    """Three of four layers have Kimi Delta Attention. The others have latent attention without positions."""

    def field(*names: str, default: Any = None) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), default)

    layers = config["num_hidden_layers"]
    linear = config.get("linear_attn_config") or {}
    kinds = config.get("layer_types")
    full = linear.get("full_attn_layers") or [i + 1 for i in range(layers) if i and i % 4 == 0]
    has_attention = [k == "full_attention" for k in kinds] if kinds else [i + 1 in full for i in range(layers)]
    hidden = config["hidden_size"]
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5))
    head_dim = linear.get("head_dim") or field("linear_head_dim", default=128)
    heads = linear.get("num_heads") or field("linear_num_heads", default=32)
    delta = DeltaSpec(
        hidden,
        heads,
        heads,
        head_dim,
        head_dim,
        linear.get("short_conv_kernel_size") or field("linear_conv_kernel_dim", default=4),
        norm,
        "kimi",
    )
    nope = config["qk_nope_head_dim"]
    rope = config["qk_rope_head_dim"]
    latent = LatentAttentionSpec(
        hidden,
        config["num_attention_heads"],
        config.get("q_lora_rank"),
        config["kv_lora_rank"],
        nope,
        rope,
        config["v_head_dim"],
        NormSpec("rms", 1e-6),
        (nope + rope) ** -0.5,
    )
    act = config.get("hidden_act", "silu")
    size = config["moe_intermediate_size"]
    shared = field("num_shared_experts", "n_shared_experts", default=1)
    experts = MoESpec(
        field("num_experts", "num_local_experts", "n_routed_experts"),
        field("num_experts_per_token", "num_experts_per_tok"),
        size,
        act,
        scoring="sigmoid",
        normalize=bool(field("moe_renormalize", "norm_topk_prob", default=True)),
        scale=config.get("routed_scaling_factor", 1.0),
        groups=field("num_expert_group", "n_group", default=1),
        topk_groups=config.get("topk_group") or 1,
        group_score="two_best",
        correction_bias=True,
        shared=MLPSpec(size * shared, act),
    )
    dense = MLPSpec(config["intermediate_size"], act)
    first = config.get("first_k_dense_replace", 1)
    sparse = [kind == "sparse" for kind in config.get("mlp_layer_types") or ()] or [i >= first for i in range(layers)]
    positions = field("model_max_length", "max_position_embeddings", default=1 << 20)
    return decoder_spec(
        {**config, "max_position_embeddings": positions, "head_dim": head_dim},
        rotary=None,
        norm=norm,
        mixer=tuple(latent if attends else delta for attends in has_attention),
        mlp=tuple(experts if is_sparse else dense for is_sparse in sparse),
        names=NAMES["deepseek"] | NAMES["kimi_linear"],
    )
