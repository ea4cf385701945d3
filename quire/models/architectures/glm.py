"""GLM-4 and GLM-4.5. Half of each head is rotated, in neighbouring pairs in GLM-4 and in halves in GLM-4.5."""

from dataclasses import replace

from quire.layers.specs import NormSpec
from quire.models.architectures.deepseek import mixtures, with_draft_layers
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec


def glm(config: HfConfig) -> DecoderSpec:
    """GLM-4, in which one tensor holds gate and up."""
    config = {"head_dim": 128, "partial_rotary_factor": 0.5, **config}
    attention = {"qkv_bias": bool(config.get("attention_bias", False)), "interleaved_rotary": True}
    return decoder_spec(config, attention=attention, names={"gate_up": "model.layers.{i}.mlp.gate_up_proj"})


def glm4(config: HfConfig) -> DecoderSpec:
    """GLM-4-0414: GLM-4 with norms after the branches as well."""
    spec = glm(config)
    return replace(spec, names={**spec.names, **NAMES["glm4"]})


def glm4_moe(config: HfConfig) -> DecoderSpec:
    """GLM-4.5, GLM-4.5-Air, GLM-4.6 and GLM-4.7: standard attention, and the experts of DeepSeek-V3."""
    config = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, **config}
    norm = NormSpec("rms", config["rms_norm_eps"]) if config.get("use_qk_norm") else None
    attention = {"qkv_bias": bool(config.get("attention_bias", False)), "qk_norm": norm}
    return decoder_spec(
        config,
        attention=attention,
        mlp=mixtures(config, is_v3=True),
        names=NAMES["deepseek_moe"],
        ignored=with_draft_layers(config),
    )
