"""Domyn Edge: norms before and after each branch; some layers have a window, others no rotary embedding."""

from collections.abc import Mapping
from dataclasses import replace

from quire.layers.attention_spec import AttentionSpec
from quire.layers.rotary_spec import rotary_spec
from quire.layers.specs import NormSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec


def domyn_edge(config: HfConfig) -> DecoderSpec:
    """A window (w, 0) has w + 1 tokens. The norm of queries has no weight."""
    own = config.get("per_layer_config") or {}
    layers = range(config["num_hidden_layers"])
    of_layers = [own.get(str(i), {}) if isinstance(own, Mapping) else own[i] for i in layers]
    whole = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    dims = [layer.get("head_dim") or whole for layer in of_layers]
    rotates = [kind == "rope" for kind in config["position_layers"]]
    windows = tuple(before + 1 if before > 0 else None for before, _ in config["window_sizes"])
    norm = NormSpec("rms", config.get("rms_norm_eps", 1e-6))
    spec = decoder_spec(config, attention={"qk_norm": norm}, norm=norm, names=NAMES["domyn_edge"], windows=windows)
    mixer = spec.mixers[0]
    assert isinstance(mixer, AttentionSpec)
    return replace(
        spec,
        mixers=tuple(replace(mixer, head_dim=dim) for dim in dims),
        rotary=tuple(rotary_spec(config, dim) if has else None for dim, has in zip(dims, rotates, strict=True)),
    )
