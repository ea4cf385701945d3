"""OLMo-2 and 3: norms only after the branches, and over all heads of q and of k; OLMo-3 has windows in most layers."""

from typing import Any

from quire.layers.specs import NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, layer_windows, rotary_by_window


def olmo2(config: HfConfig, **differences: Any) -> DecoderSpec:
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-5), wide=True)
    bias = bool(config.get("attention_bias", False))
    attention = {"qkv_bias": bias, "output_bias": bias, "qk_norm": norm, "qk_norm_over": "all"}
    return decoder_spec(config, attention=attention, norm=norm, names=NAMES["olmo2"], **differences)


def olmo3(config: HfConfig) -> DecoderSpec:
    windows = layer_windows({"sliding_window": 4096, **config}, lambda i: (i + 1) % 4 != 0)
    return olmo2(config, windows=windows, rotary=rotary_by_window(config, windows))
