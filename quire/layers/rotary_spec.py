"""Rotary position embedding as data: read from a config.json and validated, without torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ORIGINAL = "original_max_position_embeddings"  # the trained context length, before a variant extended it
ALIASES = {"su": "longrope", "deepseek_yarn": "yarn", "mrope": "default"}
NEEDED_NUMBERS: dict[str, tuple[str, ...]] = {  # by variant
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL),
    "longrope": ("short_factor", "long_factor", ORIGINAL),
    "proportional": (),
}


@dataclass(frozen=True)
class RotarySpec:
    """theta: the base. rotary_dim: the number of rotated elements of a head. max_positions: the config's
    max_position_embeddings, 0 if it has none. scaling: the checkpoint's parameters, "rope_type" and its numbers.

    Raises ValueError for an unknown variant, and for a missing or impossible parameter of the variant.
    """

    theta: float
    rotary_dim: int
    max_positions: int
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def kind(self) -> str:
        return str(self.scaling.get("rope_type", "default"))

    def __post_init__(self) -> None:
        pairs = self.rotary_dim // 2
        given = {**self.scaling, "max_position_embeddings": self.max_positions}
        if self.kind not in NEEDED_NUMBERS:
            message = f"rope type {self.kind!r} is not supported; supported: {', '.join([*NEEDED_NUMBERS, *ALIASES])}"
            raise ValueError(message)
        if pairs < 1 or self.rotary_dim % 2:
            raise ValueError(f"the rotary dimension {self.rotary_dim} is not a positive even number")
        for name in NEEDED_NUMBERS[self.kind]:
            numbers = value if isinstance(value := given.get(name), list) else [value]
            if not all(isinstance(number, int | float) and number > 0 for number in numbers):
                raise ValueError(f"rope type {self.kind!r} needs a positive {name!r}; the config has {value!r}")
            if len(numbers) not in (1, pairs):
                raise ValueError(f"{name!r} has {len(numbers)} numbers for {pairs} rotated pairs")
        if sum(given.get("mrope_section", [pairs])) != pairs:
            raise ValueError(f"mrope_section={given['mrope_section']} does not add up to {pairs} rotated pairs")


def _parameters(config: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """Return the parameters in `rope_parameters` (the new form, flat or by layer type), overridden by `rope_scaling`
    (the old form). A null parameter is treated as missing. If layer types differ (Gemma 3, OLMo 3), the old form
    applies to the layers with full attention."""
    new = config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in new.values()):
        if not new.get(layer_type or ""):
            raise ValueError(f"rope_parameters has the layer types {', '.join(new)}, but not {layer_type!r}")
        new = new[layer_type]
    old = None if layer_type == "sliding_attention" else config.get("rope_scaling")
    merged: dict[str, Any] = {"rope_type": "default"}
    for parameters in (new, old or {}):
        kind = parameters.get("rope_type") or parameters.get("type")
        merged |= {key: value for key, value in parameters.items() if value is not None and key != "type"}
        merged |= {"rope_type": ALIASES.get(kind, kind)} if kind else {}
    return merged


def rotary_spec(
    config: Mapping[str, Any], head_dim: int, layer_type: str | None = None, rotary_dim: int | None = None
) -> RotarySpec:
    """Return the rotary spec of a config.json in either form. By default theta is 10,000 and whole heads are rotated.

    layer_type: "full_attention" or "sliding_attention" if the architecture rotates these differently, else None.
    rotary_dim: overrides the config. Raises ValueError as RotarySpec does.
    """
    scaling = _parameters(config, layer_type)
    max_positions = int(config.get("max_position_embeddings") or 0)
    local = config.get("rope_local_base_freq") if layer_type == "sliding_attention" else None
    theta = scaling.pop("rope_theta", None) or local or config.get("rope_theta") or config.get("rotary_emb_base")
    if scaling["rope_type"] in ("llama3", "yarn", "longrope"):  # Phi-3 has it at the top level, which takes precedence
        scaling[ORIGINAL] = config.get(ORIGINAL) or scaling.get(ORIGINAL) or max_positions or None
    if scaling["rope_type"] != "proportional":  # where the fraction changes the frequencies instead
        fraction = scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
        rotary_dim = rotary_dim or (config.get("rotary_dim") if fraction is None else int(head_dim * fraction))
    return RotarySpec(float(theta or 10_000), head_dim if rotary_dim is None else rotary_dim, max_positions, scaling)


def max_model_positions(config: Mapping[str, Any], spec: RotarySpec) -> int:
    """Return the maximum text length of the variant, by vLLM's rule, or 0 if the config does not contain it."""
    if spec.kind not in ("linear", "dynamic", "yarn") or "gemma3" in config.get("model_type", ""):  # scaled already
        return spec.max_positions
    original = spec.scaling[ORIGINAL] if spec.kind == "yarn" else spec.max_positions
    return max(spec.max_positions, int(original * spec.scaling["factor"]))


def sharpening(factor: float, weight: float = 1.0) -> float:
    """YaRN's mscale (arXiv:2309.00071): the factor of queries and of keys in texts `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_scale_factor(spec: RotarySpec) -> float:
    """Return DeepSeek's factor of the softmax scale under YaRN: the square of the mscale with weight mscale_all_dim."""
    weight = spec.scaling.get("mscale_all_dim") if spec.kind == "yarn" else None
    return sharpening(spec.scaling["factor"], weight) ** 2 if weight else 1.0
