"""Phi-1, 1.5 and 2 (parallel branches), and Phi-3 and 4 (Llama with fused projections)."""

from quire.layers.specs import MLPSpec, NormSpec
from quire.models.spec import DecoderSpec, HfConfig, decoder_spec, layer_windows


def phi(config: HfConfig) -> DecoderSpec:
    layer = "model.layers.{i}."
    names = {
        "o": layer + "self_attn.dense", "up": layer + "mlp.fc1", "down": layer + "mlp.fc2", "mlp_norm": None,
        "q_norm": layer + "self_attn.q_layernorm", "k_norm": layer + "self_attn.k_layernorm",
        "final_norm": "model.final_layernorm",
    }  # fmt: skip
    norm = NormSpec("layer", config.get("layer_norm_eps", 1e-5), bias=True)
    qk_norm = norm if config.get("qk_layernorm") else None
    mlp = MLPSpec(config["intermediate_size"], config.get("hidden_act", "gelu_new"), gated=False, bias=True)
    return decoder_spec(
        {"partial_rotary_factor": 0.5, **config}, attention={"qkv_bias": True, "output_bias": True, "qk_norm": qk_norm},
        mlp=mlp, norm=norm, names=names, residual="parallel", lm_head_bias=True,
    )  # fmt: skip


def phi3(config: HfConfig) -> DecoderSpec:
    layer = "model.layers.{i}."
    names = {"qkv": layer + "self_attn.qkv_proj", "gate_up": layer + "mlp.gate_up_proj"}
    return decoder_spec(
        config, attention={"qkv_layout": "concatenated"}, names=names, windows=layer_windows(config)
    )  # fmt: skip
