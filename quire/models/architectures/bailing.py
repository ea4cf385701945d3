"""Ling and Ring (BailingMoE): the experts of DeepSeek with standard attention, with lightning attention in version 2.5,
or with Kimi Delta Attention in version 3. Param-2 differs in few options."""

from dataclasses import replace
from typing import Any

from quire.layers.rotary_spec import rotary_spec
from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.layers.state_spec import DeltaSpec, LightningSpec
from quire.models.architectures.deepseek import deepseek, latents, mixtures, with_draft_layers
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count


def bailing_moe(config: HfConfig) -> DecoderSpec:
    """Version 1 chooses experts by softmax. Version 2 does so as DeepSeek-V3, and has norms of queries and keys."""
    size = config.get("moe_shared_expert_intermediate_size") or config["moe_intermediate_size"]
    return _bailing(config, config.get("num_shared_experts", 0) * size)


def param2_moe(config: HfConfig) -> DecoderSpec:
    defaults = {"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "first_k_dense_replace": 1}
    shared = config.get("num_shared_experts", 1)
    size = config.get("moe_shared_expert_intermediate_size") or shared * config["moe_intermediate_size"]
    return _bailing({**defaults, **config}, size if shared else 0)


def _bailing(config: HfConfig, shared: int) -> DecoderSpec:
    """shared: the size of all shared experts together."""
    if config.get("use_bias"):
        raise ValueError("a BailingMoE with use_bias is not supported")
    is_v2 = config.get("score_function", "softmax") == "sigmoid"
    own: dict[str, Any] = {"n_routed_experts": expert_count(config), "n_shared_experts": 0}
    if config.get("n_group"):
        own["topk_method"] = "group_limited_greedy"
    corrects = bool(config.get("moe_router_enable_expert_bias", False))
    expert = MLPSpec(shared, config.get("hidden_act", "silu")) if shared else None
    mlps = tuple(
        replace(mlp, shared=expert, correction_bias=corrects) if isinstance(mlp, MoESpec) else mlp
        for mlp in mixtures({"norm_topk_prob": True, **config, **own}, is_v2)
    )
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-6))
    attention = {
        "qkv_bias": bool(config.get("use_qkv_bias", False)),
        "qkv_layout": "concatenated",
        "qk_norm": norm if config.get("use_qk_norm") else None,
    }
    names = NAMES["deepseek_moe"] | NAMES["bailing_moe"]
    return decoder_spec(config, attention=attention, mlp=mlps, names=names, ignored=with_draft_layers(config))


def bailing_moe_v3(config: HfConfig) -> DecoderSpec:
    """Ling 3: in each group of layers, the last one has latent attention, with gates, and the others have Kimi Delta
    Attention. transformers has its own names of some fields."""
    own = _V3_FIELDS.items()
    config = {**config, **{name: config[other] for name, other in own if other in config and name not in config}}
    if any(any(config.get(f"{kind}_swiglu_limit_list") or ()) for kind in ("expert", "share_expert")):
        raise ValueError("expert_swiglu_limit_list and share_expert_swiglu_limit_list are not supported")
    layers = config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    group = config.get("layer_group_size", 6)
    kinds = config.get("layer_types")
    whole = layers // group * group
    attends = [(i + 1) % group == 0 or i >= whole for i in range(layers)]
    attends = [kind == "full_attention" for kind in kinds] if kinds else attends
    size = config.get("moe_shared_expert_intermediate_size") or config["moe_intermediate_size"]
    shared = MLPSpec(size * config.get("n_shared_experts", 1))
    rope = {"rope_theta": 6_000_000.0, **config, "partial_rotary_factor": None}
    spec = deepseek({**rope, "n_shared_experts": 0, "architectures": ["DeepseekV3ForCausalLM"]})
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-6))
    dim = config.get("linear_head_dim") or config["head_dim"]
    bound = config.get("kda_lower_bound", -5.0) if config.get("kda_safe_gate", True) else None
    width = config.get("short_conv_kernel_size", 4)
    delta = DeltaSpec(spec.hidden_size, heads, heads, dim, dim, width, norm, "kimi_whole", decay_bound=bound)
    gates = config.get("gated_attention_proj_granularity_type", "head_wise")
    if gates not in ("head_wise", None):
        raise ValueError(f"gated_attention_proj_granularity_type={gates!r} is not supported")
    latent = replace(latents(spec)[0], norm=norm, output_gate="by_head" if gates else False)
    return replace(
        spec,
        norm=norm,
        mixers=tuple(latent if has else delta for has in attends),
        mlps=tuple(replace(mlp, shared=shared) if isinstance(mlp, MoESpec) else mlp for mlp in spec.mlps),
        names={**spec.names, **NAMES["bailing_moe_v3"]},
    )


def bailing_moe_v2_5(config: HfConfig) -> DecoderSpec:
    """Ling 2.5: in each group of layers, the last one has latent attention, and the others have lightning attention."""
    config = {"score_function": "softmax", "norm_topk_prob": True, "rms_norm_eps": 1e-5, **config}
    layers = config["num_hidden_layers"]
    group = config.get("layer_group_size", 1)
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    norm = NormSpec("rms", config["rms_norm_eps"])
    plain = bailing_moe(config)
    whole = {"n_shared_experts": 0, "architectures": ["DeepseekV3ForCausalLM"], "partial_rotary_factor": None}
    spec = deepseek({**config, **whole, "n_routed_experts": expert_count(config), "rope_parameters": _whole(config)})
    latent = replace(latents(spec)[0], norm=norm)

    def lightning(layer: int) -> LightningSpec:
        return LightningSpec(
            config["hidden_size"],
            heads,
            heads,
            dim,
            dim,
            1,
            norm,
            decay_rate=1 - layer / max(layers - 1, 1) + 1e-5,
            norm_groups=config.get("group_norm_size", 1),
            qk_norm=bool(config.get("use_qk_norm", False)),
            silu=bool(config.get("use_linear_silu", config.get("linear_silu", False))),
            bias=bool(config.get("use_qkv_bias", False)),
        )

    attends = [group <= 0 or (i + 1) % group == 0 for i in range(layers)]
    partial = rotary_spec(config, dim)
    return replace(
        spec,
        norm=norm,
        mixers=tuple(latent if has else lightning(i) for i, has in enumerate(attends)),
        rotary=tuple(spec.rotary[i] if has else partial for i, has in enumerate(attends)),
        mlps=plain.mlps,
        names={**spec.names, **NAMES["bailing_moe_v3"], **NAMES["bailing_moe_v2_5"]},
        ignored=(*spec.ignored, r"^model\.mtp"),
    )


def _whole(config: HfConfig) -> dict[str, Any] | None:
    """Return rope_parameters without the share of a head that is rotated, which is that of lightning attention."""
    given = config.get("rope_parameters")
    return given and {name: value for name, value in given.items() if name != "partial_rotary_factor"}


_V3_FIELDS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
