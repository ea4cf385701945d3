"""Rotary position embedding (RoFormer, arXiv:2104.09864) in all variants that checkpoints use."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quire.layers.rotary_spec import ORIGINAL, RotarySpec, sharpening

Frequencies = tuple[Tensor, float]  # radians per position by pair, float32 [rotary_dim / 2]; attention factor


def _powers(theta: float, dim: int) -> Tensor:
    """Return theta^(2i / dim), the number of positions in which pair i turns by one radian: [dim / 2]. Rounded as in
    transformers."""
    return torch.pow(theta, torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _default(spec: RotarySpec, max_positions: int) -> Frequencies:
    return 1.0 / _powers(spec.theta, spec.rotary_dim), 1.0


def _linear(spec: RotarySpec, max_positions: int) -> Frequencies:
    """Position interpolation, arXiv:2306.15595. In Gemma 4's variant, "proportional", slow pairs do not turn at all."""
    frequencies = 1.0 / _powers(spec.theta, spec.rotary_dim) / spec.scaling.get("factor", 1.0)
    frequencies[int(spec.scaling.get("partial_rotary_factor", 1.0) * spec.rotary_dim // 2) :] = 0
    return frequencies, 1.0


def _dynamic(spec: RotarySpec, max_positions: int) -> Frequencies:
    """NTK-aware scaling (in arXiv:2309.00071): beyond the trained length the base grows with the text. Cached keys
    cannot be rotated again, so the base is always that of the longest text that the engine accepts."""
    factor = spec.scaling["factor"]
    dim = spec.rotary_dim
    stretch = (factor * max(max_positions, spec.max_positions) / spec.max_positions) - (factor - 1)
    return 1.0 / _powers(spec.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(spec: RotarySpec, max_positions: int) -> Frequencies:
    """Llama 3.1: slow frequencies are divided by `factor`, fast ones are unchanged, those in between are
    interpolated."""
    factor, low, high = (spec.scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    frequencies = 1.0 / _powers(spec.theta, spec.rotary_dim)
    smooth = ((spec.scaling[ORIGINAL] / (2 * math.pi / frequencies) - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies, 1.0


def _yarn(spec: RotarySpec, max_positions: int) -> Frequencies:
    """YaRN, arXiv:2309.00071: pairs that turn less than beta_slow times in the original length have their frequency
    divided by `factor`, and those that turn more than beta_fast times keep it. mscale comes from DeepSeek-V2
    (arXiv:2405.04434).
    """
    get = spec.scaling.get
    dim = spec.rotary_dim
    factor = spec.scaling["factor"]
    lengths = [spec.scaling[ORIGINAL] / (turns * 2 * math.pi) for turns in (get("beta_fast", 32), get("beta_slow", 1))]
    low, high = [dim * math.log(length) / (2 * math.log(spec.theta)) for length in lengths]  # pairs with these turns
    if get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    powers = _powers(spec.theta, dim)
    frequencies = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    mscale = get("mscale")
    all_dim = get("mscale_all_dim")
    sharpness = sharpening(factor, mscale) / sharpening(factor, all_dim) if mscale and all_dim else sharpening(factor)
    return frequencies, float(get("attention_factor", sharpness))


def _longrope(spec: RotarySpec, max_positions: int) -> Frequencies:
    """LongRoPE, arXiv:2402.13753: one list of divisors for texts up to the original length, another for longer ones.
    Cached keys cannot be rotated again, so the longest text that the engine accepts decides between the lists, as in
    vLLM."""
    original = spec.scaling[ORIGINAL]
    divisors = spec.scaling["long_factor" if max_positions > original else "short_factor"]
    frequencies = 1.0 / (torch.tensor(divisors, dtype=torch.float32) * _powers(spec.theta, spec.rotary_dim))
    factor = spec.scaling.get("factor") or spec.max_positions / original
    sharpness = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    mscale = spec.scaling.get("long_mscale" if max_positions > original else "short_mscale")  # Phi-3.5-MoE
    return frequencies, float(mscale or spec.scaling.get("attention_factor", sharpness))


_FREQUENCIES: dict[str, Callable[[RotarySpec, int], Frequencies]] = {  # by variant
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _linear,
}


def inverse_frequencies(spec: RotarySpec, max_positions: int) -> Frequencies:
    """Return the frequencies for texts of at most max_positions tokens. cos and sin are multiplied by the attention
    factor."""
    return _FREQUENCIES[spec.kind](spec, max_positions)


class RotaryEmbedding:
    """Tables of cos and sin for every position.

    In multi-section models (Qwen2-VL, arXiv:2409.12191) a token has three positions: time, height and width. Each pair
    uses one of them, in sections (ttthhhww) or interleaved (thwthwth, Qwen3-VL).
    """

    def __init__(self, spec: RotarySpec, max_positions: int, device: torch.device) -> None:
        frequencies, attention_factor = inverse_frequencies(spec, max_positions)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
        self.cos = angles.cos().mul_(attention_factor).to(device)  # [max_positions, rotary_dim / 2]
        self.sin = angles.sin_().mul_(attention_factor).to(device)  # in place: a copy would slow the start
        pairs = torch.arange(spec.rotary_dim // 2)
        sections = torch.tensor(spec.scaling.get("mrope_section", [len(pairs)]))
        axes = torch.arange(len(sections)).repeat_interleave(sections)
        if spec.scaling.get("mrope_interleaved"):
            axes = torch.where(pairs < 3 * sections[pairs % 3], pairs % 3, 0)
        self.axes = axes.to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [tokens], or [3, tokens] for multi-section -> cos, sin: [tokens, rotary_dim / 2], float32"""
        if positions.ndim == 1:  # index_select, since x[positions] wakes torch's threads even for few tokens
            return self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        pair_positions = positions.index_select(0, self.axes).T.contiguous()  # [tokens, rotary_dim / 2]
        return self.cos.gather(0, pair_positions), self.sin.gather(0, pair_positions)
