"""Apertus: Llama with norms of queries and keys, and the activation xIELU instead of a gate."""

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec


def apertus(config: HfConfig) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5))
    mlp = MLPSpec(config["intermediate_size"], config.get("hidden_act", "xielu"), gated=False)
    attention = {"qkv_bias": bias, "output_bias": bias, "qk_norm": norm}
    return decoder_spec(
        config,
        attention=attention,
        mlp=mlp,
        norm=norm,
        names=NAMES["apertus"],
        ignored=(r"rotary_emb\.inv_freq$", r"\.act_fn\.(beta|eps)$"),
    )
