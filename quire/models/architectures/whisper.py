"""Whisper (arXiv:2212.04356): an encoder of log-mel spectra, and a decoder whose layers attend to its output."""

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec
from quire.multimodal.spec import MediaSpec


def whisper(config: HfConfig) -> DecoderSpec:
    named = {
        "num_hidden_layers": config["decoder_layers"],
        "num_attention_heads": config["decoder_attention_heads"],
        "hidden_size": config["d_model"],
        "max_position_embeddings": config.get("max_target_positions", 448),
        "head_dim": None,
        "num_key_value_heads": None,
    }
    return decoder_spec(
        {**config, **named},
        attention={"qkv_bias": True, "output_bias": True, "key_bias": False},
        rotary=None,
        position_offset=0,
        names=NAMES["whisper"],
        norm=NormSpec("layer", 1e-5, bias=True),
        residual="cross",
        mlp=MLPSpec(config["decoder_ffn_dim"], config.get("activation_function", "gelu"), gated=False, bias=True),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        media=MediaSpec("whisper", config),
        crossed=config.get("max_source_positions", 1500),
    )
