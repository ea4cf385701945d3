"""Rotary position embedding (RoFormer, arXiv:2104.09864) in each of the variants that checkpoints ask for."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ORIGINAL = "original_max_position_embeddings"  # how long texts were before a variant stretched them
Frequencies = tuple[Tensor, float]  # radians a position of each pair: [rotary_dim / 2], float32; the attention factor
ALIASES = {"su": "longrope", "deepseek_yarn": "yarn", "mrope": "default"}


@dataclass(frozen=True)
class RotarySpec:
    """theta: the base; rotary_dim: how many elements of a head are rotated; max_positions: the config's
    max_position_embeddings, 0 if it has none; scaling: the checkpoint's parameters, "rope_type" and its numbers.
    Raises ValueError for an unknown variant, and for a number of it that is missing or cannot be."""

    theta: float
    rotary_dim: int
    max_positions: int
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def kind(self) -> str:
        return str(self.scaling.get("rope_type", "default"))

    def __post_init__(self) -> None:
        pairs, given = self.rotary_dim // 2, {**self.scaling, "max_position_embeddings": self.max_positions}
        if self.kind not in VARIANTS:
            raise ValueError(f"rope type {self.kind!r} is not supported; supported: {', '.join([*VARIANTS, *ALIASES])}")
        if pairs < 1 or self.rotary_dim % 2:
            raise ValueError(f"the rotary dimension {self.rotary_dim} is not a positive even number")
        for name in VARIANTS[self.kind][1]:
            numbers = value if isinstance(value := given.get(name), list) else [value]
            if not all(isinstance(number, int | float) and number > 0 for number in numbers):
                raise ValueError(f"rope type {self.kind!r} needs a positive {name!r}; the config has {value!r}")
            if len(numbers) not in (1, pairs):
                raise ValueError(f"{name!r} has {len(numbers)} numbers for {pairs} rotated pairs")
        if sum(given.get("mrope_section", [pairs])) != pairs:
            raise ValueError(f"mrope_section={given['mrope_section']} does not add up to {pairs} rotated pairs")


def _parameters(config: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """The new form, `rope_parameters` (flat or by layer type), under the old one, `rope_scaling`; null is not there.
    Where layer types differ (Gemma 3, OLMo 3), the old one is about those that see all of the text."""
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
    """From a config.json of either form. Where it says nothing, theta is 10,000 and all of a head is rotated.
    layer_type: "full_attention" or "sliding_attention" where an architecture rotates these differently, else None.
    rotary_dim: if the architecture knows better than the config. Raises ValueError as RotarySpec does."""
    scaling, max_positions = _parameters(config, layer_type), int(config.get("max_position_embeddings") or 0)
    local = config.get("rope_local_base_freq") if layer_type == "sliding_attention" else None
    theta = scaling.pop("rope_theta", None) or local or config.get("rope_theta") or config.get("rotary_emb_base")
    if scaling["rope_type"] in ("llama3", "yarn", "longrope"):  # Phi-3 says it outside, and there it counts
        scaling[ORIGINAL] = config.get(ORIGINAL) or scaling.get(ORIGINAL) or max_positions or None
    if scaling["rope_type"] != "proportional":  # there the fraction is a parameter of the frequencies
        fraction = scaling.pop("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
        rotary_dim = rotary_dim or (config.get("rotary_dim") if fraction is None else int(head_dim * fraction))
    return RotarySpec(float(theta or 10_000), head_dim if rotary_dim is None else rotary_dim, max_positions, scaling)


def max_model_positions(config: Mapping[str, Any], spec: RotarySpec) -> int:
    """How long a text the variant was made for, by vLLM's rule; 0 if the config does not say."""
    if spec.kind not in ("linear", "dynamic", "yarn") or "gemma3" in config.get("model_type", ""):  # stretched already
        return spec.max_positions
    original = spec.scaling[ORIGINAL] if spec.kind == "yarn" else spec.max_positions
    return max(spec.max_positions, int(original * spec.scaling["factor"]))


def _powers(theta: float, dim: int) -> Tensor:
    """theta^(2i / dim), the positions in which pair i turns by one radian: [dim / 2]. Rounded as transformers does."""
    return torch.pow(theta, torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _default(spec: RotarySpec, max_positions: int) -> Frequencies:
    return 1.0 / _powers(spec.theta, spec.rotary_dim), 1.0


def _linear(spec: RotarySpec, max_positions: int) -> Frequencies:
    """Position interpolation, arXiv:2306.15595. In Gemma 4's variant, "proportional", slow pairs do not turn at all."""
    frequencies = 1.0 / _powers(spec.theta, spec.rotary_dim) / spec.scaling.get("factor", 1.0)
    frequencies[int(spec.scaling.get("partial_rotary_factor", 1.0) * spec.rotary_dim // 2) :] = 0
    return frequencies, 1.0


def _dynamic(spec: RotarySpec, max_positions: int) -> Frequencies:
    """NTK-aware scaling (in arXiv:2309.00071): beyond the trained length the base grows with the text. Cached keys keep
    their rotation, so the base is that of the longest text the engine takes, not of the text at hand."""
    factor, dim = spec.scaling["factor"], spec.rotary_dim
    stretch = (factor * max(max_positions, spec.max_positions) / spec.max_positions) - (factor - 1)
    return 1.0 / _powers(spec.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(spec: RotarySpec, max_positions: int) -> Frequencies:
    """Llama 3.1's code: slow frequencies are divided by `factor`, fast ones kept, those between interpolated."""
    factor, low, high = (spec.scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    frequencies = 1.0 / _powers(spec.theta, spec.rotary_dim)
    smooth = ((spec.scaling[ORIGINAL] / (2 * math.pi / frequencies) - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies, 1.0


def _mscale(factor: float, weight: float = 1.0) -> float:
    """The root of how much sharper attention is to be in texts `factor` times as long (arXiv:2309.00071)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(spec: RotarySpec, max_positions: int) -> Frequencies:
    """YaRN, arXiv:2309.00071: frequencies that turn less than beta_slow times in the original length are divided by
    `factor`, those that turn more than beta_fast times kept. mscale: DeepSeek-V2's addition (arXiv:2405.04434)."""
    get, dim, factor = spec.scaling.get, spec.rotary_dim, spec.scaling["factor"]
    lengths = [spec.scaling[ORIGINAL] / (turns * 2 * math.pi) for turns in (get("beta_fast", 32), get("beta_slow", 1))]
    low, high = [dim * math.log(length) / (2 * math.log(spec.theta)) for length in lengths]  # which pairs turn so often
    if get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    powers = _powers(spec.theta, dim)
    frequencies = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    mscale, all_dim = get("mscale"), get("mscale_all_dim")
    sharpness = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor)
    return frequencies, float(get("attention_factor", sharpness))


def _longrope(spec: RotarySpec, max_positions: int) -> Frequencies:
    """LongRoPE, arXiv:2402.13753: a list of divisors up to the original length, another one beyond. Cached keys keep
    their rotation, so the longest text the engine takes decides between them, as in vLLM."""
    original = spec.scaling[ORIGINAL]
    divisors = spec.scaling["long_factor" if max_positions > original else "short_factor"]
    frequencies = 1.0 / (torch.tensor(divisors, dtype=torch.float32) * _powers(spec.theta, spec.rotary_dim))
    factor = spec.scaling.get("factor") or spec.max_positions / original
    sharpness = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return frequencies, float(spec.scaling.get("attention_factor", sharpness))


VARIANTS: dict[str, tuple[Callable[[RotarySpec, int], Frequencies], tuple[str, ...]]] = {  # with the numbers they need
    "default": (_default, ()),
    "linear": (_linear, ("factor",)),
    "dynamic": (_dynamic, ("factor", "max_position_embeddings")),
    "llama3": (_llama3, ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)),
    "yarn": (_yarn, ("factor", ORIGINAL)),
    "longrope": (_longrope, ("short_factor", "long_factor", ORIGINAL)),
    "proportional": (_linear, ()),
}


def inverse_frequencies(spec: RotarySpec, max_positions: int) -> Frequencies:
    """For texts of at most max_positions tokens. The attention factor is what cos and sin are multiplied by."""
    return VARIANTS[spec.kind][0](spec, max_positions)


def softmax_scale_factor(spec: RotarySpec) -> float:
    """What DeepSeek's attention multiplies its softmax scale by under YaRN: the square of mscale_all_dim's mscale."""
    weight = spec.scaling.get("mscale_all_dim") if spec.kind == "yarn" else None
    return _mscale(spec.scaling["factor"], weight) ** 2 if weight else 1.0


class RotaryEmbedding:
    """cos and sin for every position, made once. In multi-section models (Qwen2-VL, arXiv:2409.12191) a token has three
    positions, time, height, width, and a pair follows one: in sections, ttthhhww, or interleaved, thwthwth (Qwen3-VL).
    """

    def __init__(self, spec: RotarySpec, max_positions: int, device: torch.device) -> None:
        frequencies, attention_factor = inverse_frequencies(spec, max_positions)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
        self.cos = angles.cos().mul_(attention_factor).to(device)  # [max_positions, rotary_dim / 2]
        self.sin = angles.sin_().mul_(attention_factor).to(device)  # in place: each copy takes time to start
        pairs = torch.arange(spec.rotary_dim // 2)
        sections = torch.tensor(spec.scaling.get("mrope_section", [len(pairs)]))
        axes = torch.arange(len(sections)).repeat_interleave(sections)
        if spec.scaling.get("mrope_interleaved"):
            axes = torch.where(pairs < 3 * sections[pairs % 3], pairs % 3, 0)
        self.pairs, self.axes = pairs.to(device), axes.to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [tokens], or [3, tokens] for multi-section -> cos, sin: [tokens, rotary_dim / 2], float32"""
        if positions.ndim == 1:  # by index_select: on a CPU, indexing would wake torch's threads for a few rows
            return self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        of_pairs = positions[self.axes].T  # [tokens, rotary_dim / 2]
        return self.cos[of_pairs, self.pairs], self.sin[of_pairs, self.pairs]
