"""RWKV-7 "Goose" (arXiv:2503.14456), in the format of flash-linear-attention."""

from dataclasses import replace

from quire.layers.specs import MLPSpec, NormSpec
from quire.layers.state_spec import RwkvSpec
from quire.models.spec import NAMES, DecoderSpec, HfConfig, decoder_spec


def rwkv7(config: HfConfig) -> DecoderSpec:
    """Recurrent layers and MLPs, both of which also read the previous token."""
    hidden = config["hidden_size"]
    layers = config["num_hidden_layers"]
    head_dim = config.get("head_dim") or hidden // (config.get("num_heads") or hidden // 64)
    if config.get("attn"):
        raise ValueError("RWKV-7 with layers of attention ('attn' in config.json) is not supported")
    widths = config.get("value_dim") or [hidden]
    if any(width != hidden for width in (widths if isinstance(widths, list) else [widths])):
        raise ValueError(f"RWKV-7 needs values as wide as the stream ({hidden}), and 'value_dim' is {widths}")
    heads = hidden // head_dim
    eps = config.get("norm_eps", 1e-5)
    act = config.get("hidden_act", "sqrelu")
    ranks = [config.get(f"{key}_low_rank_dim") or _rank(hidden, head_dim, *rule) for key, rule in _RANKS.items()]
    mixer = RwkvSpec(hidden, heads, heads, head_dim, head_dim, 2, NormSpec("layer", head_dim * eps), *ranks)
    size = config.get("intermediate_size") or -(-int(hidden * (config.get("hidden_ratio") or 4)) // 32) * 32
    names = NAMES["rwkv7"] | ({} if config.get("norm_first", True) else {"embedding_norm": None})
    return decoder_spec(
        {**config, "num_attention_heads": heads, "head_dim": head_dim},
        rotary=None,
        residual="shifted",
        names=names,
        mixer=(replace(mixer, value_rank=0), *(mixer,) * (layers - 1)),
        mlp=MLPSpec(size, "relu2" if act == "sqrelu" else act, gated=False),
        norm=NormSpec("layer", eps, bias=bool(config.get("norm_bias", True))),
        max_positions=max(config.get("max_position_embeddings") or 0, 1 << 20),
    )


# The default ranks if config.json has none: a multiple of the width's square root, and whether it grows with the heads.
_RANKS = {"decay": (2.5, True), "a": (2.5, True), "gate": (5.0, False), "v": (1.7, True)}


def _rank(hidden: int, head_dim: int, factor: float, grows: bool) -> int:
    root: float = hidden**0.5
    return max(32, round(factor * root * (head_dim / 64 if grows else 1) / 32) * 32)
