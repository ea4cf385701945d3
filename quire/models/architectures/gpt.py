"""GPT-2 and GPT-NeoX (Pythia)."""

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import DecoderSpec, HfConfig, decoder_spec


def gpt2(config: HfConfig) -> DecoderSpec:
    """Learned positions; the checkpoint keeps weights as [in, out]."""
    layer = "transformer.h.{i}."
    names = {
        "embedding": "transformer.wte", "positions": "transformer.wpe", "attention_norm": layer + "ln_1",
        "qkv": layer + "attn.c_attn", "o": layer + "attn.c_proj", "mlp_norm": layer + "ln_2",
        "up": layer + "mlp.c_fc", "down": layer + "mlp.c_proj", "final_norm": "transformer.ln_f",
    }  # fmt: skip
    hidden, layers = config["n_embd"], config["n_layer"]
    config = {
        **config, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": config["n_head"],
        "max_position_embeddings": config.get("n_positions", 1024),
    }  # fmt: skip
    if config.get("add_cross_attention"):
        raise ValueError("a GPT-2 with cross attention is not a decoder-only model")
    attention = {"qkv_layout": "concatenated", "qkv_bias": True, "output_bias": True, "transposed": True}
    if not config.get("scale_attn_weights", True):
        attention["scale"] = 1.0
    scales = tuple(1 / (i + 1) for i in range(layers)) if config.get("scale_attn_by_inverse_layer_idx") else None
    act = config.get("activation_function", "gelu_new")
    mlp = MLPSpec(config.get("n_inner") or 4 * hidden, act, gated=False, bias=True, transposed=True)
    return decoder_spec(
        config, attention=attention, mlp=mlp, norm=NormSpec("layer", config.get("layer_norm_epsilon", 1e-5), bias=True),
        rotary=None, position_offset=0, names=names, score_scales=scales,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)), ignored=(r"\.attn\.(masked_)?bias$",),
    )  # fmt: skip


def gpt_neox(config: HfConfig) -> DecoderSpec:
    """Both branches read the same input, each through its own norm. One tensor holds q, k and v, ordered by head."""
    layer = "gpt_neox.layers.{i}."
    names = {
        "embedding": "gpt_neox.embed_in", "attention_norm": layer + "input_layernorm",
        "qkv": layer + "attention.query_key_value", "o": layer + "attention.dense",
        "mlp_norm": layer + "post_attention_layernorm", "up": layer + "mlp.dense_h_to_4h",
        "down": layer + "mlp.dense_4h_to_h", "final_norm": "gpt_neox.final_layer_norm", "lm_head": "embed_out",
    }  # fmt: skip
    bias = bool(config.get("attention_bias", True))
    mlp = MLPSpec(config["intermediate_size"], config.get("hidden_act", "gelu"), gated=False, bias=True)
    return decoder_spec(
        {"rotary_pct": 0.25, **config}, mlp=mlp, names=names,
        attention={"qkv_layout": "by_kv_head", "qkv_bias": bias, "output_bias": bias},
        norm=NormSpec("layer", config.get("layer_norm_eps", 1e-5), bias=True),
        residual="parallel" if config.get("use_parallel_residual", True) else "sequential",
        ignored=(r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"),
    )  # fmt: skip
