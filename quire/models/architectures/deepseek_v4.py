"""DeepSeek-V4: attention to the last tokens and to compressed entries of the text, mixed residual streams, and experts
that the token ids decide in the first layers."""

from typing import Any, Literal

from quire.layers.attention_spec import IndexerSpec
from quire.layers.compressed_spec import CompressedAttentionSpec, CompressedEntriesSpec
from quire.layers.rotary_spec import RotarySpec, rotary_spec
from quire.layers.specs import HyperSpec, MLPSpec, MoESpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec

_DEFAULTS = {
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "swiglu_limit": 10.0,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 3,
}
_SCORINGS: dict[str, Literal["softmax", "sigmoid", "sqrt_softplus"]] = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "sqrt_softplus",
}
SLIDING, SELECTED, ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def deepseek_v4(config: HfConfig) -> DecoderSpec:
    config = {**_DEFAULTS, **{name: value for name, value in config.items() if value is not None}}
    layers = config["num_hidden_layers"]
    head_dim = config["head_dim"]
    rope_dim = config.get("qk_rope_head_dim") or int(head_dim * config["partial_rotary_factor"])
    main, compressed = _rotary(config, rope_dim)
    norm = NormSpec("rms", config["rms_norm_eps"], wide=True)

    def mixer(rate: int, selects: bool) -> CompressedAttentionSpec:
        indexer = IndexerSpec(config["index_n_heads"], config["index_head_dim"], config["index_topk"])
        entries = CompressedEntriesSpec(rate, config["num_attention_heads"], head_dim, indexer if selects else None)
        return CompressedAttentionSpec(
            config["hidden_size"],
            config["num_attention_heads"],
            head_dim,
            rope_dim,
            config["q_lora_rank"],
            config["o_groups"],
            config["o_lora_rank"],
            norm,
            compressed,
            entries if rate else None,
        )

    mixers = tuple(mixer(*kind) for kind in _kinds(config))
    return decoder_spec(
        config,
        mixer=mixers,
        mlp=_experts(config),
        norm=norm,
        rotary=tuple(main if mixer.entries is None else compressed for mixer in mixers),
        names=NAMES["deepseek_v4"],
        residual="hyper",
        hyper=HyperSpec(config["hc_mult"], config["hc_eps"], 2.0, config["hc_sinkhorn_iters"]),
        windows=(config["sliding_window"],) * layers,
        ignored=(r"^(model\.)?mtp\.",),
    )


def _kinds(config: HfConfig) -> list[tuple[int, bool]]:
    """Return for each layer the tokens of an entry, 0 for none, and whether an indexer selects entries. Configs list
    the tokens, or the kinds of layers."""
    layers = config["num_hidden_layers"]
    ratios = config.get("compress_ratios")
    if ratios and not config.get("layer_types"):
        return [(ratio, 0 < ratio < 128) for ratio in ratios[:layers]]
    rates = {SELECTED: 4, ALL: 128, **(config.get("compress_rates") or {}), SLIDING: 0}
    kinds = config.get("layer_types") or [ALL, ALL, *(SELECTED if i % 2 else ALL for i in range(layers - 2))]
    return [(rates[kind], kind == SELECTED) for kind in kinds[:layers]]


def _rotary(config: HfConfig, rope_dim: int) -> tuple[RotarySpec, RotarySpec]:
    """Return the rotation of layers without entries, and that of the others, which is the only one to be scaled. Under
    YaRN, cos and sin are not scaled."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "main" not in given:
        given = {
            "main": {"rope_theta": config.get("rope_theta", 10_000.0)},
            "compress": {**given, "rope_theta": config.get("compress_rope_theta", 160_000.0)},
        }
    positions = {"max_position_embeddings": config.get("max_position_embeddings")}

    def of(kind: str) -> RotarySpec:
        parameters: dict[str, Any] = {"attention_factor": 1.0, **given[kind], "partial_rotary_factor": 1.0}
        return rotary_spec({**positions, "rope_parameters": parameters}, rope_dim)

    return of("main"), of("compress")


def _experts(config: HfConfig) -> tuple[MoESpec, ...]:
    layers = config["num_hidden_layers"]
    hashed = config["num_hash_layers"]
    kinds = config.get("mlp_layer_types") or ["hash_moe" if i < hashed else "moe" for i in range(layers)]
    size = config["moe_intermediate_size"]
    limited: dict[str, Any] = {"activation": "limited_swiglu", "swiglu": (1.0, float(config["swiglu_limit"]))}

    scoring = _SCORINGS[config.get("scoring_func", "sqrtsoftplus")]

    def mixture(kind: str) -> MoESpec:
        return MoESpec(
            config["n_routed_experts"],
            config["num_experts_per_tok"],
            size,
            scoring=scoring,
            scale=config["routed_scaling_factor"],
            correction_bias=kind != "hash_moe",
            hashed=config["vocab_size"] if kind == "hash_moe" else 0,
            shared=MLPSpec(size * config.get("n_shared_experts", 1), **limited),
            **limited,
        )

    return tuple(map(mixture, kinds[:layers]))
