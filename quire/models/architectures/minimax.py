"""MiniMax-M2: experts in every layer, and one norm each over all heads of queries and of keys. MiniMax-M3: attention
to selected blocks of the text."""

from typing import Any

from quire.layers.attention_spec import AttentionSpec, BlockAttentionSpec
from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count


def minimax_m2(config: HfConfig) -> DecoderSpec:
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-6))
    mlp = MoESpec(
        expert_count(config),
        config.get("num_experts_per_tok", 8),
        config["intermediate_size"],
        config.get("hidden_act", "silu"),
        scoring="sigmoid",
        correction_bias=True,
    )
    return decoder_spec(
        {"head_dim": 128, **config},
        attention={"qk_norm": norm, "qk_norm_over": "all"},
        mlp=mlp,
        norm=norm,
        names=NAMES["mixtral"] | NAMES["minimax_m2"],
    )


# transformers' names of fields, by those in the published object sparse_attention_config
_SPARSE = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
_M3 = {
    "rms_norm_eps": 1e-6,
    "head_dim": 128,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "rotary_dim": 64,
}


def minimax_m3(config: HfConfig) -> DecoderSpec:
    sparse = config.get("sparse_attention_config") or {}
    published = {name: sparse[own] for own, name in _SPARSE.items() if own in sparse}
    config = {**_M3, **{name: value for name, value in config.items() if value is not None}, **published}
    heads = config["num_key_value_heads"]
    if config.get("index_n_heads", heads) != heads:
        raise ValueError(f"index_n_heads={config['index_n_heads']} must equal num_key_value_heads={heads}")
    norm = NormSpec("rms", config["rms_norm_eps"], wide=True, offset=1.0)
    full = AttentionSpec(config["hidden_size"], config["num_attention_heads"], heads, config["head_dim"], qk_norm=norm)
    blocks = BlockAttentionSpec(
        full,
        config["index_head_dim"],
        config["index_block_size"],
        config["index_topk_blocks"],
        config["index_local_blocks"],
    )
    return decoder_spec(
        config,
        mixer=tuple(blocks if selects else full for selects in _flags(config, sparse, "layer_types")),
        mlp=_m3_mlps(config),
        norm=norm,
        names=NAMES["mixtral"] | NAMES["minimax_m2"] | NAMES["minimax_m3"],
        ignored=(r"^(model\.)?mtp\.",),
    )


def _flags(config: HfConfig, sparse: HfConfig, field: str) -> list[bool]:
    """Return for each layer whether it selects blocks ("layer_types"), or has experts ("mlp_layer_types")."""
    layers = config["num_hidden_layers"]
    if kinds := config.get(field):
        return [kind in ("minimax_m3_sparse", "sparse") for kind in kinds[:layers]]
    published = sparse.get("sparse_attention_freq") if field == "layer_types" else config.get("moe_layer_freq")
    return [bool(flag) for flag in published[:layers]] if published else [field != "layer_types"] * layers


def _m3_mlps(config: HfConfig) -> tuple[MLPSpec | MoESpec, ...]:
    limited: dict[str, Any] = {
        "activation": "swiglu_oai",
        "swiglu": (float(config["swiglu_alpha"]), float(config["swiglu_limit"])),
    }
    experts = MoESpec(
        expert_count(config),
        config["num_experts_per_tok"],
        config["intermediate_size"],
        scoring="sigmoid",
        scale=config.get("routed_scaling_factor", 2.0),
        correction_bias=True,
        shared=MLPSpec(config["shared_intermediate_size"], **limited),
        **limited,
    )
    dense = MLPSpec(config.get("dense_intermediate_size", 12_288), **limited)
    return tuple(experts if is_sparse else dense for is_sparse in _flags(config, {}, "mlp_layer_types"))
