"""Qwen2, Qwen2.5, Qwen3, their mixtures of experts, and MiMo, which is a Qwen2.

Models up to 2.5 have biases on q, k and v. Models since 3 have norms of q and k. Windows, if any, are in upper layers.
"""

from dataclasses import replace
from typing import Any

from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count, layer_windows, rotary_by_window

# Tensors of Cosmos 3's generator, which has layers beside those of the text model
COSMOS3_GENERATOR = (r"\.(add_[qkv]_proj|to_add_out|norm_added_[qk])\.", "moe_gen")


def _windows(config: HfConfig) -> tuple[int | None, ...]:
    window = config.get("sliding_window", 4096)
    first = config.get("max_window_layers", 28)
    return layer_windows(
        {**config, "sliding_window": window if config.get("use_sliding_window") else None}, lambda i: bool(i >= first)
    )


def _mlps(config: HfConfig, normalize: bool, shared: int | None, **differences: Any) -> tuple[MLPSpec | MoESpec, ...]:
    """Every decoder_sparse_step-th layer has experts, unless mlp_only_layers lists it as dense."""
    act = config.get("hidden_act", "silu")
    step = config.get("decoder_sparse_step", 1)
    dense = MLPSpec(config["intermediate_size"], act)
    experts = MoESpec(
        expert_count(config),
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        act,
        normalize=bool(config.get("norm_topk_prob", normalize)),
        shared=MLPSpec(shared, act) if shared else None,
        shared_gate=bool(shared),
        **differences,
    )
    always_dense = config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    return tuple(experts if (i + 1) % step == 0 and i not in always_dense else dense for i in layers)


def qwen2(config: HfConfig) -> DecoderSpec:
    return decoder_spec(config, attention={"qkv_bias": True}, windows=_windows(config))


def mimo(config: HfConfig) -> DecoderSpec:
    """Xiaomi's MiMo-7B: Qwen2 with additional layers that predict further tokens, which heads/mtp.py reads."""
    spec = qwen2(config)
    return replace(spec, ignored=(*spec.ignored, r"^model\.mtp_layers\."))


def qwen3(config: HfConfig, mlp: tuple[MLPSpec | MoESpec, ...] | None = None, **differences: Any) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    eps = config.get("rms_norm_eps", 1e-6)
    config = {"head_dim": 128, **config}  # the default if the config has no head_dim
    attention = {"qkv_bias": bias, "output_bias": bias, "qk_norm": NormSpec("rms", eps)}
    differences = {"windows": _windows(config), **differences}
    return decoder_spec(config, attention=attention, mlp=mlp, names=NAMES["qwen_moe"], **differences)


def cosmos3(config: HfConfig) -> DecoderSpec:
    """The text model of Cosmos 3: a Qwen3 with other names, beside a model that generates pictures."""
    spec = qwen3(config)
    own = {
        "q_proj": "to_q",
        "k_proj": "to_k",
        "v_proj": "to_v",
        "o_proj": "to_out",
        "q_norm": "norm_q",
        "k_norm": "norm_k",
    }
    names = {
        role: name and ".".join(own.get(part, part) for part in name.split(".")) for role, name in spec.names.items()
    }
    return replace(spec, names=names, ignored=(*spec.ignored, *COSMOS3_GENERATOR))


def qwen3_moe(config: HfConfig) -> DecoderSpec:
    config = {"head_dim": config["hidden_size"] // config["num_attention_heads"], **config}
    return qwen3(config, _mlps(config, normalize=False, shared=None))


def mellum(config: HfConfig) -> DecoderSpec:
    """JetBrains' Mellum 2: a Qwen3-MoE whose layers with a window have their own rotary parameters."""
    config = {"head_dim": 128, **config}
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    windows = layer_windows({"sliding_window": 1024, **config, "layer_types": kinds})
    dense = [i for i, kind in enumerate(config.get("mlp_layer_types") or ()) if kind == "dense"]
    mlp = _mlps({**config, "mlp_only_layers": dense}, normalize=True, shared=None)
    return qwen3(config, mlp, windows=windows, rotary=rotary_by_window(config, windows))


def qwen3_vl_moe(config: HfConfig) -> DecoderSpec:
    """The text model of a Qwen3-VL with experts."""
    return qwen3(config, _mlps(config, normalize=True, shared=None, layout="fused_halves"))


def qwen2_moe(config: HfConfig) -> DecoderSpec:
    mlp = _mlps(config, normalize=False, shared=config["shared_expert_intermediate_size"])
    attention = {"qkv_bias": bool(config.get("qkv_bias", True))}
    return decoder_spec(config, attention=attention, mlp=mlp, names=NAMES["qwen_moe"], windows=_windows(config))
