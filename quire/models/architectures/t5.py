"""T5 (arXiv:1910.10683), mT5 (arXiv:2010.11934) and UMT5 (arXiv:2304.09151): a text encoder, and a decoder that attends
to its output. Relative distances between tokens replace positions."""

from dataclasses import replace

from quire.layers.attention_spec import Buckets
from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, Names, decoder_spec
from quire.multimodal.spec import MediaSpec

# Copies of the shared embedding, and an unused bias in the first checkpoints.
_IGNORED = (r"^(encoder|decoder)\.embed_tokens\.weight$", r"\.EncDecAttention\.relative_attention_bias\.weight$")
_TRAINED = 512  # tokens of a text, if the config has no limit; nothing else limits them
_OF_DECODER = ("cross_norm", "cross_q", "cross_k", "cross_v", "cross_o", "lm_head")


def t5(config: HfConfig) -> DecoderSpec:
    """T5 and FLAN-T5. T5 1.0 has one table for embedding and head, and scales the input of the head."""
    return _both(config, NAMES["t5"], scaled=_scales(config))


def mt5(config: HfConfig) -> DecoderSpec:
    return _both(config, NAMES["t5"], scaled=False)


def umt5(config: HfConfig) -> DecoderSpec:
    """UMT5, in which each layer has its own position biases."""
    bias = str(NAMES["t5"]["distance_bias"]).replace(".0.", ".{i}.", 1)
    return _both(config, NAMES["t5"] | {"distance_bias": bias}, scaled=_scales(config))


def _scales(config: HfConfig) -> bool:
    """Whether the head's inputs are scaled. transformers 5 saves this; before, models with tied embeddings scaled
    them."""
    return bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True)))


def _both(config: HfConfig, names: Names, scaled: bool) -> DecoderSpec:
    mlp = _mlp(config)
    if not mlp.gated:
        names = {**names, "gate": None, "up": str(names["up"]).removesuffix("_1")}
    of_encoder = {
        role: name and name.replace("decoder.", "encoder.").replace("layer.2.", "layer.1.")
        for role, name in names.items()
    }
    longest = config.get("n_positions") or _TRAINED
    layers = config["num_layers"]
    read = _stack(config, layers, longest, mlp, is_causal=False)
    read = replace(read, names={**of_encoder, **dict.fromkeys(_OF_DECODER)})
    written = _stack(config, config.get("num_decoder_layers") or layers, longest, mlp, is_causal=True)
    return replace(
        written,
        names=names,
        residual="cross",
        crossed=longest,
        logit_scale=config["d_model"] ** -0.5 if scaled else None,
        tie_embeddings=True if scaled else None,
        media=MediaSpec("text", config, encoder=read),
    )


def _stack(config: HfConfig, layers: int, longest: int, mlp: MLPSpec, is_causal: bool) -> DecoderSpec:
    """Return the fields that the encoder and the decoder share."""
    named = {
        "num_hidden_layers": layers,
        "num_attention_heads": config["num_heads"],
        "hidden_size": config["d_model"],
        "head_dim": config["d_kv"],
        "num_key_value_heads": None,
        "max_position_embeddings": longest,
    }
    return decoder_spec(
        {**config, **named},
        attention={"scale": 1.0, "buckets": _buckets(config), "is_causal": is_causal},
        rotary=None,
        norm=NormSpec("rms", config.get("layer_norm_epsilon", 1e-6)),
        mlp=mlp,
        ignored=_IGNORED,
    )


def _buckets(config: HfConfig) -> Buckets:
    count = config.get("relative_attention_num_buckets", 32)
    reach = config.get("relative_attention_max_distance", 128)
    if count < 4 or reach <= count // 2:
        raise ValueError(
            f"relative_attention_num_buckets={count} must be at least 4, and less than twice "
            f"relative_attention_max_distance={reach}"
        )
    return Buckets(count, reach)


def _mlp(config: HfConfig) -> MLPSpec:
    named = config.get("feed_forward_proj", "relu")
    gated, _, activation = named.rpartition("-")
    if gated not in ("", "gated"):
        raise ValueError(f"feed_forward_proj={named!r} must be an activation, or one behind 'gated-'")
    if named == "gated-gelu":
        activation = "gelu_new"
    return MLPSpec(config["d_ff"], activation, gated=bool(gated))
