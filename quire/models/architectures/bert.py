"""Encoders: BERT, RoBERTa (also XLM-R and Jina's), ModernBERT, NomicBERT and GTE. Each token attends to all tokens of
the text."""

from dataclasses import replace

from quire.layers.rotary_spec import RotarySpec, rotary_spec
from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, Names, decoder_spec

_ROTARY = ("rotary", "rope")
# Heads, which poolers read when needed, and a buffer.
_IGNORED = (r"^(\w+\.)?pooler\.", r"^(cls|lm_head|classifier|score|head|decoder)\b", r"embeddings\.position_ids$")


def bert(config: HfConfig) -> DecoderSpec:
    """Learned positions, and norms after the residual sums."""
    kind = config.get("position_embedding_type") or "absolute"
    if kind != "absolute":
        raise ValueError(f"position_embedding_type={kind!r} is not supported; only 'absolute' is")
    return decoder_spec(
        config,
        attention={"qkv_bias": True, "output_bias": True, "is_causal": False},
        names=NAMES["bert"],
        rotary=None,
        mlp=MLPSpec(config["intermediate_size"], config.get("hidden_act", "gelu"), gated=False, bias=True),
        norm=NormSpec("layer", config.get("layer_norm_eps", 1e-12), bias=True),
        residual="post_norm",
        position_offset=0,
        token_types=config.get("type_vocab_size", 2),
        tie_embeddings=False,
        ignored=_IGNORED,
    )


def roberta(config: HfConfig) -> DecoderSpec:
    """BERT whose first positions are reserved for padding."""
    if config.get("position_embedding_type") in _ROTARY or "use_flash_attn" in config:
        return jina_roberta(config)
    spec = bert(config)
    offset = config.get("pad_token_id", 1) + 1
    names = _renamed(spec.names, "bert.", "roberta.")
    return replace(spec, names=names, position_offset=offset, max_positions=spec.max_positions - offset)


def jina_roberta(config: HfConfig) -> DecoderSpec:
    """Jina's RoBERTa: other names, q, k and v in one tensor, and in most models rotary positions (arXiv:2409.10173)."""
    is_rotary = config.get("position_embedding_type", "rotary") in _ROTARY
    offset = None if is_rotary else config.get("pad_token_id", 1) + 1
    spec = decoder_spec(
        config,
        attention={"qkv_bias": True, "output_bias": True, "qkv_layout": "concatenated", "is_causal": False},
        names=NAMES["bert"] | NAMES["jina_roberta"],
        rotary="default" if is_rotary else None,
        mlp=MLPSpec(config["intermediate_size"], config.get("hidden_act", "gelu"), gated=False, bias=True),
        norm=NormSpec("layer", config.get("layer_norm_eps", 1e-5), bias=True),
        residual="post_norm",
        position_offset=offset,
        token_types=config.get("type_vocab_size", 1),
        tie_embeddings=False,
        ignored=_IGNORED,
    )
    return spec if offset is None else replace(spec, max_positions=spec.max_positions - offset)


def colbert(config: HfConfig) -> DecoderSpec:
    return (roberta if config.get("model_type") == "xlm-roberta" else bert)(config)


def _renamed(names: Names, prefix: str, other: str) -> Names:
    return {role: name and name.replace(prefix, other, 1) for role, name in names.items()}


def modernbert(config: HfConfig) -> DecoderSpec:
    """Rotary positions, norms before the branches, gated activations; two of three layers attend only to nearby
    tokens."""
    layers = config["num_hidden_layers"]
    every = config.get("global_attn_every_n_layers", 3)
    kinds = config.get("layer_types") or ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
    thetas = {
        "full_attention": config.get("global_rope_theta", 160_000.0),
        "sliding_attention": config.get("local_rope_theta") or config.get("global_rope_theta", 10_000.0),
    }
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rotary = tuple(rotary_spec({"rope_theta": thetas[kind], **config}, head_dim, kind) for kind in kinds)
    bias = bool(config.get("attention_bias", False))
    return decoder_spec(
        config,
        attention={"qkv_bias": bias, "output_bias": bias, "qkv_layout": "concatenated", "is_causal": False},
        mlp=MLPSpec(
            config["intermediate_size"],
            config.get("hidden_activation", "gelu"),
            bias=bool(config.get("mlp_bias", False)),
        ),
        norm=NormSpec("layer", config.get("norm_eps", 1e-5), bias=bool(config.get("norm_bias", False))),
        rotary=rotary,
        names=NAMES["modernbert"],
        first_norm=False,
        tie_embeddings=False,
        ignored=_IGNORED,
        windows=tuple(config.get("local_attention", 128) // 2 if k == "sliding_attention" else None for k in kinds),
    )


def nomic_bert(config: HfConfig) -> DecoderSpec:
    """BERT with rotary positions; in the first version gated activations and no biases, in the second one experts."""
    sizes = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    }
    config = {**{name: config[old] for name, old in sizes.items() if old in config}, **config}
    if config.get("prenorm") or config.get("rotary_emb_fraction", 1) != 1:
        raise ValueError(
            "a NomicBERT with norms before its branches, or without rotation of whole heads is not supported"
        )
    # Positions beyond max_trained_positions would need a base that depends on the length of each text.
    trained = config.get("max_trained_positions") or config["max_position_embeddings"]
    config = {
        "rope_theta": config.get("rotary_emb_base", 10_000.0),
        **config,
        "max_position_embeddings": min(trained, config["max_position_embeddings"]),
    }
    epsilon = config.get("layer_norm_eps") or config.get("layer_norm_epsilon", 1e-12)
    bias = bool(config.get("qkv_proj_bias", False))
    is_gated = config.get("activation_function", "swiglu") == "swiglu"
    own = NAMES["nomic_bert"] if is_gated else NAMES["nomic_bert"] | NAMES["nomic_moe"]
    return decoder_spec(
        config,
        attention={"qkv_layout": "concatenated", "is_causal": False, "qkv_bias": bias, "output_bias": bias},
        names=NAMES["bert"] | own,
        mlp=_nomic_mlps(config, is_gated),
        norm=NormSpec("layer", epsilon, bias=True),
        residual="post_norm",
        token_types=config.get("type_vocab_size", 2),
        tie_embeddings=False,
        ignored=_IGNORED,
    )


def _nomic_mlps(config: HfConfig, is_gated: bool) -> tuple[MLPSpec | MoESpec, ...]:
    """Every second layer of the second version has experts."""
    size = int(config["intermediate_size"])
    layers = int(config["num_hidden_layers"])
    if is_gated:
        return (MLPSpec(size, "silu"),) * layers
    activation = config["activation_function"]
    dense = MLPSpec(size, activation, gated=False, bias=bool(config.get("mlp_fc1_bias", True)))
    every = config.get("moe_every_n_layers") or 0
    if not every:
        return (dense,) * layers
    experts = MoESpec(config["num_experts"], config.get("moe_top_k", 2), size, activation, normalize=False, gated=False)
    return tuple(experts if i % every == 1 else dense for i in range(layers))


def gte(config: HfConfig) -> DecoderSpec:
    """BERT with rotary positions and gated activations."""
    base = "gte" if config.get("model_type") == "gte" else "new"
    kinds = config.get("type_vocab_size", 1)
    names = _renamed(NAMES["bert"] | NAMES["gte"], "gte.", f"{base}.")
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rotary = None
    scaling = config.get("rope_scaling") or {}
    if scaling.get("type") == "ntk":  # a larger base, and all frequencies divided by a power of the same factor
        factor = scaling["factor"]
        linear = {"rope_type": "linear", "factor": factor ** (2 / head_dim)}
        rotary = RotarySpec(config.get("rope_theta", 10_000.0) * factor, head_dim, 0, linear)
    for name, value in (("position_embedding_type", "rope"), ("layer_norm_type", "layer_norm")):
        if config.get(name, value) != value:
            raise ValueError(f"{name}={config[name]!r} is not supported; only {value!r} is")
    if config.get("logn_attention_scale"):
        raise ValueError("logn_attention_scale is not supported")
    return decoder_spec(
        config,
        attention={"qkv_bias": True, "output_bias": True, "qkv_layout": "concatenated", "is_causal": False},
        mlp=MLPSpec(config["intermediate_size"], config.get("hidden_act", "gelu"), down_bias=True),
        norm=NormSpec("layer", config.get("layer_norm_eps", 1e-12), bias=True),
        rotary=rotary or "default",
        residual="post_norm",
        names=names,
        token_types=kinds,
        tie_embeddings=False,
        ignored=_IGNORED,
    )
