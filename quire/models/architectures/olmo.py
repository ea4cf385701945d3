"""OLMo, OLMoE and FlexOlmo. Since OLMo-2, norms come only after the branches, and over all heads of q and of k; OLMo-3
has windows in most layers."""

from typing import Any

from quire.layers.specs import MoESpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count, layer_windows, rotary_by_window


def olmo(config: HfConfig) -> DecoderSpec:
    """OLMo-1: Llama with layer norms that have no weights."""
    return decoder_spec(config, attention=_attention(config), norm=NormSpec("layer", 1e-5, affine=False))


def olmoe(config: HfConfig) -> DecoderSpec:
    """Many small experts in every layer, and norms over all heads of q and of k."""
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5))
    mlp = MoESpec(
        expert_count(config),
        config["num_experts_per_tok"],
        config["intermediate_size"],
        config.get("hidden_act", "silu"),
        normalize=bool(config.get("norm_topk_prob", False)),
    )
    attention = {**_attention(config), "qk_norm": norm, "qk_norm_over": "all"}
    return decoder_spec(config, attention=attention, mlp=mlp, norm=norm, names=NAMES["qwen_moe"])


def flex_olmo(config: HfConfig) -> DecoderSpec:
    """OLMo-2 with experts that were trained separately."""
    mlp = MoESpec(
        expert_count(config),
        config.get("num_experts_per_tok", 5),
        config["intermediate_size"],
        config.get("hidden_act", "silu"),
        normalize=bool(config.get("norm_topk_prob", False)),
    )
    config = {"rms_norm_eps": 1e-6, "rope_theta": 500_000.0, **config}
    return olmo2(config, mlp=mlp, names=NAMES["qwen_moe"] | NAMES["olmo2"])


def _attention(config: HfConfig) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "output_bias": bias, "qkv_clip": config.get("clip_qkv")}


def olmo2(config: HfConfig, **differences: Any) -> DecoderSpec:
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5), wide=True)
    bias = bool(config.get("attention_bias", False))
    attention = {"qkv_bias": bias, "output_bias": bias, "qk_norm": norm, "qk_norm_over": "all"}
    return decoder_spec(config, attention=attention, norm=norm, **{"names": NAMES["olmo2"], **differences})


def olmo3(config: HfConfig) -> DecoderSpec:
    windows = layer_windows({"sliding_window": 4096, **config}, lambda i: (i + 1) % 4 != 0)
    return olmo2(config, windows=windows, rotary=rotary_by_window(config, windows))
