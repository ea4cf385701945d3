"""GLM-4: half of each head is rotated, in neighbouring pairs, and one tensor holds gate and up."""

from dataclasses import replace

from quire.models.spec import DecoderSpec, HfConfig, decoder_spec


def glm(config: HfConfig) -> DecoderSpec:
    config = {"head_dim": 128, "partial_rotary_factor": 0.5, **config}
    attention = {"qkv_bias": bool(config.get("attention_bias", False)), "interleaved_rotary": True}
    return decoder_spec(config, attention=attention, names={"gate_up": "model.layers.{i}.mlp.gate_up_proj"})


def glm4(config: HfConfig) -> DecoderSpec:
    """GLM-4-0414: GLM-4 with norms after the branches as well."""
    spec, layer = glm(config), "model.layers.{i}."
    norms = {"attention_post_norm": layer + "post_self_attn_layernorm", "mlp_post_norm": layer + "post_mlp_layernorm"}
    return replace(spec, names={**spec.names, **norms})
