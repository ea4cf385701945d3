"""Tencent's Hunyuan: Llama with norms of queries and keys after their rotation; larger models have experts.
Hy3 has norms before the rotation, and the experts of DeepSeek-V3. Hy4 has several residual streams, and sparse latent
attention with gates and sinks."""

from dataclasses import replace
from typing import Any

from quire.layers.attention_spec import IndexerSpec
from quire.layers.rotary_spec import RotarySpec, rotary_spec
from quire.layers.specs import HyperSpec, MLPSpec, MoESpec, NormSpec
from quire.models.architectures.deepseek import deepseek, indexer_types, latents, mixtures, with_draft_layers
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count


def hunyuan(config: HfConfig, mlp: Any = None) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    config = {"rms_norm_eps": 1e-5, **config}
    norm = NormSpec("rms", config["rms_norm_eps"])
    attention = {"qkv_bias": bias, "output_bias": bias, "qk_norm": norm, "norm_after_rotary": True}
    return decoder_spec(config, attention=attention, mlp=mlp, rotary=_rotary(config), names=NAMES["hunyuan"])


def hunyuan_moe(config: HfConfig) -> DecoderSpec:
    """Every layer has experts, and a shared expert that all tokens use. Per-layer values are equal in all published
    models."""
    act = config.get("hidden_act", "silu")
    chosen = config.get("moe_topk", 1)
    size = config.get("moe_intermediate_size") or config["intermediate_size"]
    size, chosen = (value[0] if isinstance(value, list) else value for value in (size, chosen))
    shared = MLPSpec(config["intermediate_size"], act)
    return hunyuan(config, MoESpec(expert_count(config), chosen, size, act, shared=shared))


def hy_v3(config: HfConfig) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5))
    experts = {
        "n_routed_experts": expert_count(config),
        "n_shared_experts": config.get("num_shared_experts", 1),
        "routed_scaling_factor": config.get("router_scaling_factor", 2.826),
    }
    config = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0, "first_k_dense_replace": 1, **config}
    return decoder_spec(
        config,
        attention={"qkv_bias": bias, "output_bias": bias, "qk_norm": norm},
        mlp=mixtures({**config, **experts}, is_v3=True),
        names=NAMES["hunyuan"] | NAMES["hy_v3"],
        ignored=with_draft_layers(config),
    )


_HY4 = {
    "rms_norm_eps": 1e-5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 2048,
    "hc_mult": 4,
}


def hy_v4(config: HfConfig) -> DecoderSpec:
    """Most layers attend to the tokens that a layer before has selected."""
    config = {**_HY4, **config}
    eps = config["rms_norm_eps"]
    layers = config["num_hidden_layers"]
    kinds = ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(layers)]
    kinds = indexer_types({"indexer_types": kinds, **{k: v for k, v in config.items() if v is not None}})
    indexer = IndexerSpec(
        config["index_n_heads"], config["index_head_dim"], config["index_topk"], rotates_last=True, eps=eps
    )
    spec = deepseek({**config, "rope_interleave": False})
    mixers = tuple(
        replace(mixer, indexer=indexer, shares_selection=kind == "shared", sinks=True, output_gate=True)
        for mixer, kind in zip(latents(spec), kinds, strict=True)
    )
    limit = float(config.get("swiglu_limit", 10.0))
    limits: dict[str, Any] = {"activation": "limited_swiglu", "swiglu": (1.0, limit)} if limit > 0 else {}
    return replace(
        spec,
        mixers=mixers,
        mlps=tuple(replace(m, layout="stacked", **limits) if isinstance(m, MoESpec) else m for m in spec.mlps),
        residual="hyper",
        hyper=HyperSpec(config["hc_mult"], config.get("hc_eps", 1e-6), config.get("hc_magnitude", 2.0)),
        names={**spec.names, **NAMES["hy_v4"]},
        ignored=(*spec.ignored, r"^model\.mtp_layers\."),
    )


def _rotary(config: HfConfig) -> RotarySpec:
    """The type "dynamic" with `alpha` means a larger base (NTK-aware scaling), the same for all text lengths."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    scaling = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    if not (alpha := scaling.get("alpha")):
        return rotary_spec(config, head_dim)
    theta = scaling.get("rope_theta") or config.get("rope_theta") or 10_000
    theta *= alpha ** (head_dim / (head_dim - 2))
    return RotarySpec(theta, head_dim, int(config.get("max_position_embeddings") or 0))
