"""Falcon: 7B (one KV head), 40B and 180B (grouped, two norms a layer), 11B (grouped, one norm), RW (linear biases)."""

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec


def falcon(config: HfConfig) -> DecoderSpec:
    heads = config["num_attention_heads"]
    hidden = config["hidden_size"]
    bias = bool(config.get("bias", False))
    alibi = bool(config.get("alibi", False))
    grouped = bool(config.get("new_decoder_architecture", False))
    one_kv_head = not grouped and config.get("multi_query", True)
    parallel = grouped or config.get("parallel_attn", True)
    two_norms = grouped and config.get("num_ln_in_parallel_attn") in (None, 2)
    layer = "transformer.h.{i}."
    names = {
        **NAMES["falcon"],
        "attention_norm": layer + ("ln_attn" if two_norms else "input_layernorm"),
        "mlp_norm": None if parallel else layer + "post_attention_layernorm",
    }
    if two_norms:
        names["mlp_norm"] = layer + "ln_mlp"
    kv_heads = (grouped and config.get("num_kv_heads")) or heads
    attention = {
        "num_kv_heads": 1 if one_kv_head else kv_heads,
        "qkv_layout": "concatenated" if one_kv_head else "by_kv_head",
        "alibi": alibi,
        "qkv_bias": bias,
        "output_bias": bias,
    }
    inner = config.get("ffn_hidden_size") or 4 * hidden
    act = config.get("activation", "gelu")
    differences = {"rotary": None} if alibi else {}
    return decoder_spec(
        config,
        attention=attention,
        mlp=MLPSpec(inner, act, gated=False, bias=bias),
        names=names,
        norm=NormSpec("layer", config.get("layer_norm_epsilon", 1e-5), bias=True),
        residual="parallel" if parallel else "sequential",
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        **differences,
    )
