"""GLM-4 and GLM-4.5. Half of each head is rotated, in neighbouring pairs in GLM-4 and in halves in GLM-4.5."""

from dataclasses import replace

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.architectures.deepseek import mixtures, with_draft_layers
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, with_common_names


def glm(config: HfConfig) -> DecoderSpec:
    """GLM-4, in which one tensor holds gate and up."""
    config = {"head_dim": 128, "partial_rotary_factor": 0.5, **config}
    attention = {"qkv_bias": bool(config.get("attention_bias", False)), "interleaved_rotary": True}
    return decoder_spec(config, attention=attention, names={"gate_up": "model.layers.{i}.mlp.gate_up_proj"})


def chatglm(config: HfConfig) -> DecoderSpec:
    """ChatGLM2, ChatGLM3 and the first GLM-4: GLM-4 with other names, and q, k and v in one tensor."""
    if config.get("apply_residual_connection_post_layernorm"):
        raise ValueError("a ChatGLM with apply_residual_connection_post_layernorm is not supported")
    config = with_common_names(
        config,
        vocab_size="padded_vocab_size",
        num_hidden_layers="num_layers",
        intermediate_size="ffn_hidden_size",
        head_dim="kv_channels",
        max_position_embeddings="seq_length",
    )
    bias = bool(config.get("add_bias_linear", False))
    attention = {
        "qkv_bias": bias or bool(config.get("add_qkv_bias", False)),
        "output_bias": bias,
        "qkv_layout": "concatenated",
        "interleaved_rotary": bool(config.get("original_rope", True)),
    }
    own = {"rope_theta": 10_000 * config.get("rope_ratio", 1), "partial_rotary_factor": 0.5}
    if config.get("multi_query_attention"):
        own["num_key_value_heads"] = config["multi_query_group_num"]
    is_rms = config.get("rmsnorm", True)
    return decoder_spec(
        {**config, **own},
        attention=attention,
        mlp=MLPSpec(config["intermediate_size"], bias=bias),
        norm=NormSpec("rms" if is_rms else "layer", config.get("layernorm_epsilon", 1e-5), bias=not is_rms),
        names=NAMES["chatglm"] if config.get("post_layer_norm", True) else NAMES["chatglm"] | {"final_norm": None},
        ignored=(r"rotary_pos_emb\.inv_freq$",),
    )


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
