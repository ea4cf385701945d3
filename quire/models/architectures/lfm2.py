"""LFM2, LFM2-MoE and LFM3: gated short convolutions in many layers, and attention with norms of q and k in others."""

from dataclasses import replace

from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.layers.state_spec import ShortConvSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count, layer_windows, rotary_by_window


def lfm2(config: HfConfig, mlp: tuple[MLPSpec | MoESpec, ...] | None = None) -> DecoderSpec:
    hidden = config["hidden_size"]
    norm = NormSpec("rms", config.get("norm_eps", 1e-5))
    layers = config["num_hidden_layers"]
    attends = config.get("full_attn_idxs")
    attends = range(layers) if attends is None else attends
    kinds = config.get("layer_types") or ["full_attention" if i in attends else "conv" for i in range(layers)]
    bias = bool(config.get("conv_bias", False))
    conv = ShortConvSpec(hidden, hidden, 1, 0, 1, config.get("conv_L_cache", 3), norm, bias)
    spec = decoder_spec(
        {"rope_theta": 1e6, **config},
        attention={"qk_norm": norm},
        mlp=mlp or _dense(config),
        norm=norm,
        names=NAMES["lfm2"],
        tie_embeddings=bool(config.get("tie_embedding", config.get("tie_word_embeddings", True))),
    )
    pairs = zip(spec.mixers, kinds, strict=True)
    return replace(spec, mixers=tuple(conv if kind == "conv" else mixer for mixer, kind in pairs))


def lfm2_moe(config: HfConfig) -> DecoderSpec:
    """The first layers are dense."""
    experts = MoESpec(
        expert_count(config),
        config.get("num_experts_per_tok", 4),
        config["moe_intermediate_size"],
        scoring="sigmoid",
        normalize=bool(config.get("norm_topk_prob", True)),
        scale=config.get("routed_scaling_factor", 1.0),
        correction_bias=bool(config.get("use_expert_bias", True)),
    )
    dense = MLPSpec(config["intermediate_size"])
    first = config.get("num_dense_layers", 2)
    return lfm2(config, tuple(dense if i < first else experts for i in range(config["num_hidden_layers"])))


def _dense(config: HfConfig) -> MLPSpec:
    """The config has the size of an MLP without a gate. The size of the gated MLP is derived from it."""
    size = config.get("block_ff_dim") or config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim", True):
        multiplier = config.get("block_ffn_dim_multiplier", 1.0)
        size = int(2 * size / 3)
        if multiplier is not None:
            unit = config.get("block_multiple_of", 256)
            size = -(-int(multiplier * size) // unit) * unit
    return MLPSpec(size)


_ROTARY3 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


def lfm3(config: HfConfig) -> DecoderSpec:
    """Half of the attention layers have a window. Each head's result has a gate, and branches end with a norm."""
    config = {"head_dim": 128, "conv_L_cache": 7, "sliding_window": 256, "rope_parameters": _ROTARY3, **config}
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [
        "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i > 0 else "conv"
        for i in range(layers)
    ]
    hidden = config["hidden_size"]
    norm = NormSpec("rms", config.get("norm_eps", 1e-5))
    bias = bool(config.get("attention_bias", False))
    conv = ShortConvSpec(hidden, hidden, 1, 0, 1, config["conv_L_cache"], norm, bool(config.get("conv_bias", False)))
    windows = layer_windows({**config, "layer_types": kinds})
    gate = "by_head" if config.get("use_attention_gate", True) else False
    spec = decoder_spec(
        config,
        attention={"qkv_bias": bias, "output_bias": bias, "qk_norm": norm, "output_gate": gate},
        norm=norm,
        names=NAMES["lfm2"] | NAMES["lfm3"],
        windows=windows,
        rotary=rotary_by_window(config, windows),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
    )
    mixers = tuple(conv if kind == "conv" else mixer for mixer, kind in zip(spec.mixers, kinds, strict=True))
    names = spec.names
    if not config.get("use_sandwich_norm", True):
        names = {**names, "attention_post_norm": None, "mlp_post_norm": None}
    return replace(spec, mixers=mixers, names=names)
