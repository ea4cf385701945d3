"""gpt-oss: experts with biases and a clamped activation, attention sinks, a window in every other layer."""

from quire.layers.specs import MoESpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count, layer_windows


def gpt_oss(config: HfConfig) -> DecoderSpec:
    bias = bool(config.get("attention_bias", True))
    experts = MoESpec(
        expert_count(config),
        config.get("num_experts_per_tok", 4),
        config["intermediate_size"],
        "swiglu_oai",
        swiglu=(config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)),
        bias=True,
        layout="fused",
    )
    return decoder_spec(
        {"head_dim": 64, **config},
        attention={"qkv_bias": bias, "output_bias": bias, "sinks": True},
        mlp=experts,
        norm=NormSpec("rms", config.get("rms_norm_eps", 1e-5), wide=True),
        names=NAMES["gpt_oss"],
        windows=layer_windows({"sliding_window": 128, **config}, lambda i: i % 2 == 0),
    )
