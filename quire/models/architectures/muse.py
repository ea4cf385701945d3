"""Muse Glimmer: gated attention, norms without weights of embeddings, queries and keys, and norms around branches."""

from dataclasses import replace

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, layer_windows


def muse_glimmer(config: HfConfig) -> DecoderSpec:
    """The text model; the weights of a vision tower are ignored. Every fourth layer, counted from the last, has neither
    a window nor a rotary embedding."""
    config = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, **(config.get("text_config") or config)}
    eps = config["rms_norm_eps"]
    last = config["num_hidden_layers"] - 1
    centered = NormSpec("rms", eps, wide=True, offset=1.0)
    after = replace(centered, eps=config.get("post_norm_eps", 1e-8))
    plain = NormSpec("rms", eps, wide=True)
    without = replace(plain, affine=False)
    bias = bool(config.get("attention_bias", False))
    thetas = config.get("layer_rope_theta") or [(last - i) % 4 for i in range(last + 1)]
    spec = decoder_spec(
        config,
        attention={
            "qkv_bias": bias,
            "output_bias": bias,
            "qk_norm": without,
            "output_gate": "separate",
            "scale": config["head_dim"] ** -0.5 * config.get("qk_scale_factor", 3.87),
        },
        mlp=MLPSpec(config["intermediate_size"], config.get("hidden_activation") or "silu"),
        norm=centered,
        norms={"attention_post_norm": after, "mlp_post_norm": after, "embedding_norm": without, "final_norm": plain},
        windows=layer_windows({"sliding_window": 2048, **config}, lambda i: bool((last - i) % 4)),
        logit_scale=config.get("output_multiplier", 1.0),
        logit_soft_cap=config.get("final_logit_softcapping", 20.0),
        names=NAMES["sandwich_norms"] | NAMES["muse"],
        ignored=(r"rotary_emb\.inv_freq$", r"^(model\.)?vision_"),
    )
    rotary = tuple(r if theta else None for r, theta in zip(spec.rotary, thetas, strict=True))
    return replace(spec, rotary=rotary)
