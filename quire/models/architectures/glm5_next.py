"""GLM-5-Next: Kimi Linear's layers with mixed residual streams, and sparse attention to pools of tokens."""

from dataclasses import replace
from typing import Any

from quire.layers.attention_spec import IndexerSpec, LatentAttentionSpec
from quire.layers.specs import HyperSpec, MLPSpec, MoESpec, NormSpec
from quire.layers.state_spec import DeltaSpec
from quire.models.architectures.deepseek import indexer_types
from quire.models.architectures.delta_net import kimi_linear
from quire.models.spec import NAMES, DecoderSpec, HfConfig, MixerSpec

_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 3,
    "index_kpool": 16,
    "index_kpool_always_select_tail": True,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "swiglu_limit": 10.0,
    "routed_scaling_factor": 2.5,
    "linear_num_heads": 64,
}


def glm5_next(config: HfConfig) -> DecoderSpec:
    config = {**_DEFAULTS, **{name: value for name, value in config.items() if value is not None}}
    if not config["index_kpool_always_select_tail"]:
        raise ValueError("a GLM-5-Next whose queries may attend to no token is not supported")
    if any(kind == "shared" for kind in indexer_types({"index_topk_freq": 1, **config})):
        raise ValueError("a GLM-5-Next whose layers share selections is not supported")
    kinds = config.get("layer_types") or ["linear_attention" if i % 4 != 3 else "" for i in range(_layers(config))]
    kinds = ["linear_attention" if kind == "linear_attention" else "full_attention" for kind in kinds]
    spec = kimi_linear({**config, "layer_types": kinds})
    norm = NormSpec("rms", config["rms_norm_eps"])
    indexer = IndexerSpec(
        config["index_n_heads"], config["index_head_dim"], config["index_topk"], pool=config["index_kpool"]
    )

    def mixer(old: MixerSpec | None) -> MixerSpec | None:
        if isinstance(old, DeltaSpec):
            return replace(old, decay_bound=_bound(config))
        assert isinstance(old, LatentAttentionSpec)
        return replace(old, norm=norm, indexer=indexer, bias=bool(config.get("attention_bias", False)))

    limits: dict[str, Any] = {"activation": "limited_swiglu", "swiglu": (1.0, float(config["swiglu_limit"]))}

    def mlp(old: MLPSpec | MoESpec | None) -> MLPSpec | MoESpec | None:
        if isinstance(old, MoESpec) and old.shared is not None:
            return replace(old, shared=replace(old.shared, **limits), **limits)
        return old if old is None else replace(old, **limits)

    return replace(
        spec,
        mixers=tuple(map(mixer, spec.mixers)),
        mlps=tuple(map(mlp, spec.mlps)),
        residual="hyper",
        hyper=HyperSpec(config["hc_mult"], config["hc_eps"], 2.0, config["hc_sinkhorn_iters"]),
        names={**spec.names, **NAMES["deepseek_moe"], **NAMES["glm5_next"]},
        ignored=(*spec.ignored, rf"^model\.layers\.{_layers(config)}\.", r"\.shared_head\."),
    )


def _layers(config: HfConfig) -> int:
    return int(config["num_hidden_layers"])


def _bound(config: HfConfig) -> float | None:
    """Return the least logarithm of a decay, None for no bound."""
    linear = config.get("linear_attn_config") or {}
    bound = linear.get("gate_lower_bound", config.get("linear_lower_bound"))
    return -5.0 if bound is None and linear.get("safe_gate", True) and linear else bound
