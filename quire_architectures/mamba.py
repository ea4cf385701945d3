"""State-space models, and their hybrids with attention: Mamba-2 and Bamba."""

from dataclasses import replace
from typing import Any

from quire.layers.specs import MLPSpec, NormSpec
from quire.layers.state_spec import Mamba2Spec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec


def mamba2(config: HfConfig) -> DecoderSpec:
    """Mamba-2: layers of one branch, without attention."""
    heads, head_dim = config["num_heads"], config["head_dim"]
    mixer = Mamba2Spec(
        config["hidden_size"], heads, config.get("n_groups", 8), config["state_size"], head_dim,
        config.get("conv_kernel", 4), norm := NormSpec("rms", config.get("layer_norm_epsilon", 1e-5)),
        conv_bias=bool(config.get("use_conv_bias", True)), bias=bool(config.get("use_bias", False)),
        time_step=limits(config.get("time_step_limit")),
    )  # fmt: skip
    config = {"num_attention_heads": heads, "head_dim": head_dim, "max_position_embeddings": 1 << 20, **config}
    return decoder_spec(
        config, mixer=mixer, mlp=(None,) * config["num_hidden_layers"], norm=norm, rotary=None, residual="single",
        names=NAMES["mamba2"],
    )  # fmt: skip


def limits(time_step: Any) -> tuple[float, float]:
    """transformers writes infinity as a number, as a string or as an object."""
    if time_step is None:
        return 0.0, float("inf")
    least, most = (float("inf") if isinstance(limit, dict) else float(limit) for limit in time_step)
    return least, most


def mixer(config: HfConfig, norm: NormSpec, prefix: str = "mamba_", **differences: Any) -> Mamba2Spec:
    """The state-space layer of a hybrid, by the fields that Bamba introduced."""
    inner, heads = config[f"{prefix}expand"] * config["hidden_size"], config[f"{prefix}n_heads"]
    head_dim = config.get(f"{prefix}d_head", "auto")
    fields: dict[str, Any] = {
        "conv_bias": bool(config.get(f"{prefix}conv_bias", True)),
        "bias": bool(config.get(f"{prefix}proj_bias", False)),
        "time_step": limits(config.get("time_step_limit")),
    }  # fmt: skip
    return Mamba2Spec(
        config["hidden_size"], heads, config[f"{prefix}n_groups"], config[f"{prefix}d_state"],
        inner // heads if head_dim == "auto" else head_dim, config.get(f"{prefix}d_conv", 4), norm,
        **{**fields, **differences},
    )  # fmt: skip


def bamba(config: HfConfig) -> DecoderSpec:
    """Bamba: some layers have attention, with half of each head rotated."""
    config = {"partial_rotary_factor": 0.5, **config}
    norm, bias = NormSpec("rms", config.get("rms_norm_eps", 1e-5)), bool(config.get("attention_bias", False))
    attention = {"qkv_bias": bias, "output_bias": bias}
    mlp = MLPSpec(
        config["intermediate_size"], config.get("hidden_act", "silu"), bias=bool(config.get("mlp_bias", False))
    )
    spec = decoder_spec(config, attention=attention, mlp=mlp, norm=norm, names=NAMES["bamba"])
    layers, state_space = config.get("attn_layer_indices") or (), mixer(config, norm)
    return replace(spec, mixers=tuple(m if i in layers else state_space for i, m in enumerate(spec.mixers)))
