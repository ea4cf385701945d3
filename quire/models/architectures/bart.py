"""BART (arXiv:1910.13461) and mBART (arXiv:2001.08210): a text encoder, and a decoder that attends to its output."""

from dataclasses import replace
from math import sqrt
from typing import Any

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, Names, decoder_spec
from quire.multimodal.spec import MediaSpec

# Copies of the shared embedding.
_IGNORED = (r"(encoder|decoder)\.embed_tokens\.weight$",)
_DECODER: Names = NAMES["whisper"] | NAMES["bart"]
_OF_DECODER = ("cross_norm", "cross_q", "cross_k", "cross_v", "cross_o", "lm_head", "lm_head_bias")


def bart(config: HfConfig) -> DecoderSpec:
    """The norms come after the residual sums, and there is no final norm."""
    return _both(config, {"residual": "post_norm"}, {"residual": "cross_post_norm"}, {"final_norm": None})


def mbart(config: HfConfig) -> DecoderSpec:
    """Build mBART, whose norms come before the branches, as in Whisper."""
    return _both(config, {}, {"residual": "cross"}, {})


def _both(config: HfConfig, encoder: dict[str, Any], decoder: dict[str, Any], names: Names) -> DecoderSpec:
    if not config.get("tie_word_embeddings", True):
        raise ValueError("tie_word_embeddings=False is not supported: encoder, decoder and head share one embedding")
    read = _stack(config, "encoder", is_causal=False)
    positions = config.get("max_position_embeddings", 1024)
    of_encoder = {
        role: name and name.replace("model.decoder.", "model.encoder.") for role, name in {**_DECODER, **names}.items()
    }
    read = replace(read, names={**of_encoder, **dict.fromkeys(_OF_DECODER)}, **encoder)
    return replace(
        _stack(config, "decoder", is_causal=True),
        names={**_DECODER, **names},
        lm_head_bias=True,
        crossed=positions,
        media=MediaSpec("text", config, encoder=read),
        **decoder,
    )


def _stack(config: HfConfig, side: str, is_causal: bool) -> DecoderSpec:
    """Return the fields that the encoder and the decoder share."""
    named = {
        "num_hidden_layers": config[f"{side}_layers"],
        "num_attention_heads": config[f"{side}_attention_heads"],
        "hidden_size": config["d_model"],
        "head_dim": None,
        "num_key_value_heads": None,
        "max_position_embeddings": config.get("max_position_embeddings", 1024),
    }
    return decoder_spec(
        {**config, **named},
        attention={"qkv_bias": True, "output_bias": True, "is_causal": is_causal},
        rotary=None,
        norm=NormSpec("layer", 1e-5, bias=True),
        position_offset=2,
        tie_embeddings=True,
        ignored=_IGNORED,
        mlp=MLPSpec(config[f"{side}_ffn_dim"], config.get("activation_function", "gelu"), gated=False, bias=True),
        embedding_scale=sqrt(config["d_model"]) if config.get("scale_embedding") else None,
    )
