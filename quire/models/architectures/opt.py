"""OPT: learned positions and ReLU. OPT-350m has its norms after the sums, and a narrower embedding."""

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import DecoderSpec, HfConfig, decoder_spec


def opt(config: HfConfig) -> DecoderSpec:
    layer, before = "model.decoder.layers.{i}.", bool(config.get("do_layer_norm_before", True))
    final_norm = before and not config.get("_remove_final_layer_norm", False)
    names = {
        "embedding": "model.decoder.embed_tokens", "positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in", "project_out": "model.decoder.project_out",
        "attention_norm": layer + "self_attn_layer_norm", "o": layer + "self_attn.out_proj",
        **{key: f"{layer}self_attn.{key}_proj" for key in "qkv"}, "mlp_norm": layer + "final_layer_norm",
        "up": layer + "fc1", "down": layer + "fc2",
        "final_norm": "model.decoder.final_layer_norm" if final_norm else None,
    }  # fmt: skip
    bias = bool(config.get("enable_bias", True))
    act = config.get("activation_function", "relu")
    return decoder_spec(
        config, attention={"qkv_bias": bias, "output_bias": bias}, rotary=None, position_offset=2, names=names,
        mlp=MLPSpec(config["ffn_dim"], act, gated=False, bias=bias),
        norm=NormSpec("layer", 1e-5, bias=True, affine=bool(config.get("layer_norm_elementwise_affine", True))),
        residual="sequential" if before else "post_norm", embedding_size=config.get("word_embed_proj_dim"),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
    )  # fmt: skip
