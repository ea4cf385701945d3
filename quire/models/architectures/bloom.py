"""BLOOM and MPT, whose only positions are linear biases on attention scores."""

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec

_ALIBI = {"alibi": True, "alibi_unscaled": True}


def bloom(config: HfConfig) -> DecoderSpec:
    """Like Falcon-RW, with a norm of the embeddings."""
    if config.get("apply_residual_connection_post_layernorm"):
        raise ValueError("a BLOOM with apply_residual_connection_post_layernorm is not supported")
    hidden = config["hidden_size"] if "hidden_size" in config else config["n_embed"]
    config = {
        **config,
        "hidden_size": hidden,
        "num_hidden_layers": config["n_layer"] if "n_layer" in config else config["num_hidden_layers"],
        "num_attention_heads": config["n_head"] if "n_head" in config else config["num_attention_heads"],
        "max_position_embeddings": config.get("seq_length") or 2048,
    }
    return decoder_spec(
        config,
        attention={**_ALIBI, "qkv_layout": "by_kv_head", "qkv_bias": True, "output_bias": True},
        mlp=MLPSpec(4 * hidden, "gelu_pytorch_tanh", gated=False, bias=True),
        norm=NormSpec("layer", config.get("layer_norm_epsilon", 1e-5), bias=True),
        rotary=None,
        names=NAMES["falcon"] | NAMES["bloom"],
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def mpt(config: HfConfig) -> DecoderSpec:
    """MPT has no biases. Raises ValueError for the settings of MosaicML's code that transformers' code ignores."""
    own = {"alibi": True, "qk_ln": False, "prefix_lm": False, **(config.get("attn_config") or {})}
    if not own["alibi"] or own["qk_ln"] or own["prefix_lm"] or not config.get("no_bias", True):
        raise ValueError("an MPT is supported with alibi and no_bias, without qk_ln and prefix_lm")
    hidden = config["d_model"]
    config = {
        **config,
        "hidden_size": hidden,
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "max_position_embeddings": config.get("max_seq_len", 2048),
    }
    return decoder_spec(
        config,
        attention={
            **_ALIBI,
            "qkv_layout": "concatenated",
            "qkv_clip": own.get("clip_qkv"),
            "scale": own.get("softmax_scale"),
        },
        mlp=MLPSpec(config.get("expansion_ratio", 4) * hidden, "gelu", gated=False),
        norm=NormSpec("layer", config.get("layer_norm_epsilon", 1e-5)),
        rotary=None,
        names=NAMES["mpt"],
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
    )
