"""EXAONE 4: norms only after the branches, and three sliding-window layers for each global one."""

from quire.layers.rotary_spec import rotary_spec
from quire.layers.specs import NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, layer_windows


def exaone4(config: HfConfig) -> DecoderSpec:
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
        names=NAMES["olmo2"],
        windows=windows,
        rotary=tuple(rotary if everywhere or window is not None else None for window in windows),
    )
