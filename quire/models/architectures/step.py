"""Step 1, and Step 3.5 to 3.7: gates of heads, more query heads in layers with a window, limited activations."""

from dataclasses import replace
from typing import Any

from quire.layers.attention_spec import AttentionSpec
from quire.layers.rotary_spec import rotary_spec
from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.models.architectures.deepseek import with_draft_layers
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, layer_windows, with_common_names

# transformers' names of fields, by those of the published configs
_FIELDS = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}


def step1(config: HfConfig) -> DecoderSpec:
    """Llama with biases of -slope * sqrt(distance) instead of rotary embeddings."""
    config = with_common_names(
        config, num_key_value_heads="num_attention_groups", max_position_embeddings="max_seq_len"
    )
    config = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_key_value_heads": 1, **config}
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        config,
        attention={"qkv_bias": bias, "output_bias": bias, "root_reach": config["max_position_embeddings"]},
        mlp=MLPSpec(config["intermediate_size"], bias=bool(config.get("mlp_bias", False))),
        rotary=None,
        tie_embeddings=config.get("tie_word_embeddings"),
    )


def step3p5(config: HfConfig) -> DecoderSpec:
    """Fields may also list the layers that predict further tokens, after the others."""
    config = {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "share_expert_dim": 1280,
        **{_FIELDS.get(name, name): value for name, value in config.items()},
    }
    layers = config["num_hidden_layers"]
    kinds = (config.get("layer_types") or ["full_attention"] * layers)[:layers]
    norm = NormSpec("rms", config["rms_norm_eps"], wide=True, offset=1.0)
    bias = bool(config.get("attention_bias", False))
    full = AttentionSpec(
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        bias,
        bias,
        qk_norm=norm,
        output_gate="by_head" if config.get("use_head_wise_attn_gate", True) else False,
        scale=(config.get("query_pre_attn_scalar") or config["head_dim"]) ** -0.5,
    )
    other = (config.get("attention_other_setting") or {}).get("num_attention_heads")
    sliding = replace(full, num_heads=config.get("num_sliding_attention_heads") or other or full.num_heads)
    return decoder_spec(
        config,
        mixer=tuple(sliding if kind == "sliding_attention" else full for kind in kinds),
        mlp=_mlps(config),
        norm=norm,
        rotary=tuple(rotary_spec(_rope_of(config, i), config["head_dim"], kind) for i, kind in enumerate(kinds)),
        windows=layer_windows({**config, "layer_types": kinds}),
        names=NAMES["step"],
        ignored=(*with_draft_layers({"num_nextn_predict_layers": 0, **config}), r"^(model\.)?(vision|vit)_"),
    )


def step3p7(config: HfConfig) -> DecoderSpec:
    """The text model of a Step 3.7. The weights of its vision tower are ignored."""
    return step3p5({"tie_word_embeddings": config.get("tie_word_embeddings", False), **config["text_config"]})


def _rope_of(config: HfConfig, layer: int) -> HfConfig:
    """Return the config with the rotary fields of a layer. The published configs list them."""
    theta = config.get("rope_theta", 10_000.0)
    shares = config.get("partial_rotary_factors")
    share: dict[str, Any] = {"partial_rotary_factor": shares[layer]} if shares else {}
    return {**config, **share, "rope_theta": theta[layer] if isinstance(theta, list) else theta}


def _mlps(config: HfConfig) -> tuple[MLPSpec | MoESpec, ...]:
    layers = range(config["num_hidden_layers"])
    kinds = config.get("mlp_layer_types")
    listed = config.get("moe_layers_enum")
    if not kinds:
        chosen = range(3, len(layers)) if listed is None else listed.split(",") if isinstance(listed, str) else listed
        sparse = {int(i) for i in chosen}
        kinds = ["sparse" if i in sparse else "dense" for i in layers]
    bias = bool(config.get("mlp_bias", False))

    def activation(field: str, layer: int) -> dict[str, Any]:
        limits = config.get(field)
        limit = limits[layer] if limits else None
        return {"activation": "swiglu_step", "swiglu": (1.0, float(limit))} if limit else {}

    def mlp(layer: int) -> MLPSpec | MoESpec:
        dense = MLPSpec(config["intermediate_size"], bias=bias, **activation("swiglu_limits_shared", layer))
        if kinds[layer] == "dense":
            return dense
        return MoESpec(
            config["n_routed_experts"],
            config["num_experts_per_tok"],
            config["moe_intermediate_size"],
            scoring="sigmoid",
            scale=config.get("moe_router_scaling_factor", 1.0),
            correction_bias=True,
            shared=replace(dense, intermediate_size=config["share_expert_dim"]),
            layout="stacked",
            **activation("swiglu_limits", layer),
        )

    return tuple(map(mlp, layers))
