"""OPT: learned positions and ReLU. OPT-350m has its norms after the residual sums, and a narrower embedding."""

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec


def opt(config: HfConfig) -> DecoderSpec:
    before = bool(config.get("do_layer_norm_before", True))
    final_norm = before and not config.get("_remove_final_layer_norm", False)
    names = NAMES["opt"] if final_norm else {**NAMES["opt"], "final_norm": None}
    bias = bool(config.get("enable_bias", True))
    act = config.get("activation_function", "relu")
    return decoder_spec(
        config,
        attention={"qkv_bias": bias, "output_bias": bias},
        rotary=None,
        position_offset=2,
        names=names,
        mlp=MLPSpec(config["ffn_dim"], act, gated=False, bias=bias),
        norm=NormSpec("layer", 1e-5, bias=True, affine=bool(config.get("layer_norm_elementwise_affine", True))),
        residual="sequential" if before else "post_norm",
        embedding_size=config.get("word_embed_proj_dim"),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
    )
