"""Rotary position embedding: the tables of cosines and sines, in each of the variants that checkpoints ask for."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RotarySpec:
    """theta: the base; rotary_dim: how many elements of a head are rotated; scaling: the checkpoint's parameters."""

    theta: float
    rotary_dim: int
    scaling: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return str(self.scaling.get("rope_type") or self.scaling.get("type") or "default")


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: slow frequencies are divided by `factor`, fast ones kept, those between interpolated."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = float(scaling["original_max_position_embeddings"]) / (2 * math.pi / frequencies)  # in that context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def inverse_frequencies(spec: RotarySpec) -> Tensor:
    """Radians a position for each rotated pair: [rotary_dim / 2], float32. Raises ValueError for an unknown variant."""
    exponent = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    frequencies: Tensor = 1.0 / torch.pow(spec.theta, exponent)  # rounded as in the reference implementations
    if spec.kind == "default":
        return frequencies
    if spec.kind == "linear":
        return frequencies / float(spec.scaling["factor"])
    if spec.kind == "llama3":
        return _llama3(frequencies, spec.scaling)
    raise ValueError(f"rope type {spec.kind!r} is not supported yet; supported: default, linear, llama3")


class RotaryEmbedding:
    """cos and sin for every position, made once."""

    def __init__(self, spec: RotarySpec, max_positions: int, device: torch.device) -> None:
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inverse_frequencies(spec)[None, :]
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)  # [max_positions, rotary_dim / 2]

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [tokens] -> cos, sin: [tokens, rotary_dim / 2], float32"""
        return self.cos[positions], self.sin[positions]
