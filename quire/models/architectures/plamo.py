"""PLaMo 3: norms before and after each branch, stored less a constant, and windows in most layers."""

from dataclasses import replace

from quire.layers.specs import NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec, layer_windows, rotary_by_window

_OFFSETS = {"attention_post_norm": 1 / 5, "mlp_post_norm": 1 / 5**1.5}  # of the others: 1


def plamo3(config: HfConfig) -> DecoderSpec:
    window = config.get("window_size") or config.get("sliding_window") or 2048
    own = {"sliding_window": window, "rope_local_base_freq": config.get("rope_local_theta", 10_000)}
    config = {"rope_theta": 1_000_000.0, "tie_word_embeddings": True, **config, **own}
    every = config.get("sliding_window_pattern") or 8
    windows = layer_windows(config, lambda i: (i + 1) % every != 0)
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-6), offset=1.0)
    return decoder_spec(
        config,
        attention={"qkv_layout": "concatenated", "qk_norm": norm},
        norm=norm,
        norms={role: replace(norm, offset=offset) for role, offset in _OFFSETS.items()},
        windows=windows,
        rotary=rotary_by_window(config, windows),
        names=NAMES["plamo3"],
    )
