"""Qwen2, Qwen2.5 and Qwen3: biases on q, k, v until 2.5, norms on q and k since 3; windows, if any, in upper layers."""

from quire.models.spec import DecoderSpec, HfConfig, decoder_spec


def _windows(config: HfConfig) -> tuple[int | None, ...]:
    num_layers = config["num_hidden_layers"]
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    kinds = config.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.get("max_window_layers", 28)
    return tuple(window if i >= first else None for i in range(num_layers))


def qwen2(config: HfConfig) -> DecoderSpec:
    return decoder_spec(config, qkv_bias=True, windows=_windows(config))


def qwen3(config: HfConfig) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    config = {"head_dim": 128, **config}  # the default of a config that does not say
    return decoder_spec(config, qkv_bias=bias, output_bias=bias, qk_norm=True, windows=_windows(config))
