"""GPT-2, StarCoder (GPT-BigCode), GPT-J, CodeGen and GPT-NeoX (Pythia)."""

from typing import Any

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec


def _gpt2_fields(config: HfConfig, positions: int) -> dict[str, Any]:
    """Return the config with the common names of its fields. positions: the default of n_positions."""
    return {
        **config,
        "hidden_size": config["n_embd"],
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"],
        "max_position_embeddings": config.get("n_positions", positions),
    }


def gpt2(config: HfConfig, transposed: bool = True, **attention: Any) -> DecoderSpec:
    """Learned positions; the checkpoint stores weights as [in, out]."""
    config = {"activation_function": "gelu_new", **_gpt2_fields(config, 1024)}
    if config.get("add_cross_attention"):
        raise ValueError("a GPT-2 with cross attention is not a decoder-only model")
    if not config.get("scale_attn_weights", True):
        attention["scale"] = 1.0
    layers = config["num_hidden_layers"]
    scales = tuple(1 / (i + 1) for i in range(layers)) if config.get("scale_attn_by_inverse_layer_idx") else None
    inner = config.get("n_inner") or 4 * config["hidden_size"]
    biases = {"qkv_bias": True, "output_bias": True, "transposed": transposed}
    return decoder_spec(
        config,
        attention={"qkv_layout": "concatenated", **biases, **attention},
        mlp=MLPSpec(inner, config["activation_function"], gated=False, bias=True, transposed=transposed),
        norm=NormSpec("layer", config.get("layer_norm_epsilon", 1e-5), bias=True),
        rotary=None,
        position_offset=0,
        names=NAMES["gpt2"],
        score_scales=scales,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        ignored=(r"\.attn\.(masked_)?bias$",),
    )


def gpt_bigcode(config: HfConfig) -> DecoderSpec:
    """StarCoder and SantaCoder: GPT-2 with one KV head."""
    config = {"activation_function": "gelu_pytorch_tanh", **config}
    one_kv_head = bool(config.get("multi_query", True))
    layout = "concatenated" if one_kv_head else "by_kv_head"
    kv_heads = 1 if one_kv_head else config["n_head"]
    return gpt2({**config, "num_key_value_heads": kv_heads}, transposed=False, qkv_layout=layout)


def gptj(config: HfConfig, **attention: Any) -> DecoderSpec:
    """Parallel branches through one norm, and partial rotation of neighbouring pairs."""
    config = {"rotary_dim": 64, **_gpt2_fields(config, 2048)}
    act = config.get("activation_function", "gelu_new")
    return decoder_spec(
        config,
        attention={"interleaved_rotary": True, **attention},
        mlp=MLPSpec(config.get("n_inner") or 4 * config["hidden_size"], act, gated=False, bias=True),
        norm=NormSpec("layer", config.get("layer_norm_epsilon", 1e-5), bias=True),
        names=NAMES["gptj"],
        residual="parallel",
        lm_head_bias=True,
        ignored=(r"\.attn\.(masked_)?bias$", r"\.causal_mask$"),
    )


def codegen(config: HfConfig) -> DecoderSpec:
    """GPT-J with one tensor for queries, values and keys, in four blocks."""
    return gptj(config, qkv_layout="codegen")


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
