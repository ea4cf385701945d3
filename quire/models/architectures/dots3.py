"""dots3: latent attention with gates of heads, in some layers with other sizes and a window, in others sparse."""

from dataclasses import replace
from typing import Any

from quire.layers.attention_spec import IndexerSpec, LatentAttentionSpec
from quire.layers.rotary_spec import RotarySpec, rotary_spec
from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.models.architectures.deepseek import mixtures
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, layer_windows

_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "shared_experts_intermediate_size": 1536,
}
_SLIDING = {
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def dots3_note(config: HfConfig) -> DecoderSpec:
    """The text model; the weights of towers are ignored. Published configs have fields with the prefix swa_ for layers
    with a window, and those of transformers a table by layer."""
    config = {**_DEFAULTS, **(config.get("text_config") or config)}
    layers = config["num_hidden_layers"]
    listed = config.get("per_layer_config")
    table = {int(layer): own for layer, own in (listed or {}).items()}
    kinds = config.get("layer_types")
    if not kinds:
        kinds = ["full_attention" if i < 2 or i % 4 == 1 else "sliding_attention" for i in range(layers)]
    if config.get("use_dsa", listed is None):
        kinds = ["indexed_attention" if kind == "full_attention" else kind for kind in kinds]
    sliding = {name: config.get(f"swa_{name}", default) for name, default in _SLIDING.items()}

    def fields(layer: int) -> dict[str, Any]:
        if kinds[layer] != "sliding_attention":
            return config
        return {**config, **(sliding if listed is None else table.get(layer, {}))}

    return decoder_spec(
        config,
        mixer=tuple(_latent(fields(i), kinds[i] == "indexed_attention") for i in range(layers)),
        mlp=_mlps(config),
        norm=NormSpec("rms", config["rms_norm_eps"]),
        rotary=tuple(_rotary(config, kinds[i], fields(i)["qk_rope_head_dim"]) for i in range(layers)),
        windows=layer_windows(
            {"sliding_window": config.get("sliding_window_size", 512), **config, "layer_types": kinds}
        ),
        names=NAMES["deepseek_moe"] | NAMES["deepseek"] | NAMES["dots3"],
        ignored=(r"rotary_emb\.inv_freq$", r"^(model\.)?(vision|audio)_"),
    )


def _latent(config: HfConfig, selects: bool) -> LatentAttentionSpec:
    hidden = config["hidden_size"]
    norm = NormSpec("rms", config["rms_norm_eps"])
    nope = config["qk_nope_head_dim"]
    rope = config["qk_rope_head_dim"]
    indexer = IndexerSpec(config["index_n_heads"], config["index_head_dim"], config["index_topk"], True)
    return LatentAttentionSpec(
        hidden,
        config["num_attention_heads"],
        config["q_lora_rank"],
        config["kv_lora_rank"],
        nope,
        rope,
        config["v_head_dim"],
        replace(norm, scale=(hidden / config["kv_lora_rank"]) ** 0.5),
        (nope + rope) ** -0.5,
        bool(config.get("attention_bias", False)),
        indexer=indexer if selects else None,
        output_gate="by_head",
        q_norm=replace(norm, scale=(hidden / config["q_lora_rank"]) ** 0.5),
        rope_norm=norm,
    )


def _rotary(config: HfConfig, kind: str, rope_dim: int) -> RotarySpec:
    if config.get("rope_parameters"):
        return rotary_spec(config, rope_dim, kind, rope_dim)
    theta = config.get("swa_rope_theta", 5e4) if kind == "sliding_attention" else config.get("rope_theta", 8e7)
    return rotary_spec({**config, "rope_theta": theta}, rope_dim, rotary_dim=rope_dim)


def _mlps(config: HfConfig) -> tuple[MLPSpec | MoESpec, ...]:
    size = config.get("moe_shared_expert_intermediate_size") or config["shared_experts_intermediate_size"]
    shared = MLPSpec(size * config["n_shared_experts"], config.get("hidden_act", "silu"))
    mlps = mixtures(config, is_v3=True)
    return tuple(replace(mlp, shared=shared) if isinstance(mlp, MoESpec) else mlp for mlp in mlps)
