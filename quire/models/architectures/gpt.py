"""GPT-2 and GPT-NeoX (Pythia)."""

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec


def gpt2(config: HfConfig) -> DecoderSpec:
    """Learned positions; the checkpoint stores weights as [in, out]."""
    hidden = config["n_embd"]
    layers = config["n_layer"]
    config = {
        **config,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": config["n_head"],
        "max_position_embeddings": config.get("n_positions", 1024),
    }
    if config.get("add_cross_attention"):
        raise ValueError("a GPT-2 with cross attention is not a decoder-only model")
    attention = {"qkv_layout": "concatenated", "qkv_bias": True, "output_bias": True, "transposed": True}
    if not config.get("scale_attn_weights", True):
        attention["scale"] = 1.0
    scales = tuple(1 / (i + 1) for i in range(layers)) if config.get("scale_attn_by_inverse_layer_idx") else None
    act = config.get("activation_function", "gelu_new")
    mlp = MLPSpec(config.get("n_inner") or 4 * hidden, act, gated=False, bias=True, transposed=True)
    return decoder_spec(
        config,
        attention=attention,
        mlp=mlp,
        norm=NormSpec("layer", config.get("layer_norm_epsilon", 1e-5), bias=True),
        rotary=None,
        position_offset=0,
        names=NAMES["gpt2"],
        score_scales=scales,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        ignored=(r"\.attn\.(masked_)?bias$",),
    )


def gpt_neox(config: HfConfig) -> DecoderSpec:
    """Both branches read the same input, each through its own norm. One tensor holds q, k and v, ordered by head."""
    bias = bool(config.get("attention_bias", True))
    mlp = MLPSpec(config["intermediate_size"], config.get("hidden_act", "gelu"), gated=False, bias=True)
    return decoder_spec(
        {"rotary_pct": 0.25, **config},
        mlp=mlp,
        names=NAMES["gpt_neox"],
        attention={"qkv_layout": "by_kv_head", "qkv_bias": bias, "output_bias": bias},
        norm=NormSpec("layer", config.get("layer_norm_eps", 1e-5), bias=True),
        residual="parallel" if config.get("use_parallel_residual", True) else "sequential",
        ignored=(r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"),
    )
