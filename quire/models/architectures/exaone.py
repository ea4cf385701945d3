"""EXAONE 4: norms only after the branches, and three sliding-window layers for each global one. K-EXAONE has norms
before the branches, and experts."""

from typing import Any

from quire.layers.rotary_spec import rotary_spec
from quire.layers.specs import NormSpec
from quire.models.architectures.deepseek import mixtures
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, expert_count, layer_windows


def exaone4(config: HfConfig, **differences: Any) -> DecoderSpec:
    """If the model has windows, its global layers have no rotary embedding."""
    pattern = config.get("sliding_window_pattern") or 4
    pattern = len(pattern) if isinstance(pattern, str) else pattern  # "LLLG": the last one is global
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5))
    windows = layer_windows(config, lambda i: (i + 1) % pattern != 0)
    rotary = rotary_spec(config, config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    everywhere = config.get("sliding_window") is None
    return decoder_spec(
        config,
        attention={"qk_norm": norm},
        norm=norm,
        windows=windows,
        rotary=tuple(rotary if everywhere or window is not None else None for window in windows),
        **{"names": NAMES["olmo2"], **differences},
    )


def exaone_moe(config: HfConfig) -> DecoderSpec:
    """EXAONE MoE and K-EXAONE, with the experts of DeepSeek-V3."""
    experts = {"n_routed_experts": expert_count(config), "n_shared_experts": config.get("num_shared_experts", 1)}
    config = {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, **config, **experts}
    names = NAMES["deepseek_moe"] | {"correction_bias": "model.layers.{i}.mlp.e_score_correction_bias"}
    ignored = (r"rotary_emb\.inv_freq$", r"^mtp\.")
    return exaone4(config, mlp=mixtures(config, is_v3=True), names=names, ignored=ignored)
