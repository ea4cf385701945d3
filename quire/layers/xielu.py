"""The activation xIELU (arXiv:2411.13010), whose two slopes are learned in each layer."""

import torch
from torch import Tensor
from torch.nn import functional

from quire.layers.build import Builder

BETA, EPS = 0.5, -1e-6  # constants of all published models


class XIELU:
    """x > 0: p x^2 + x / 2; otherwise n (e^min(x, eps) - 1 - x) + x / 2, with learned p and n.

    name: the prefix of the checkpoint's alpha_p and alpha_n, of one element each; p and n are made of their softplus.
    """

    def __init__(self, builder: Builder, name: str) -> None:
        self.alphas = builder.whole(f"{name}.alpha_p", 1), builder.whole(f"{name}.alpha_n", 1)
        self._slopes: tuple[Tensor, Tensor] | None = None
        builder.when_loaded(self._find_slopes)

    def _find_slopes(self) -> None:
        positive, negative = (functional.softplus(alpha.float()) for alpha in self.alphas)
        self._slopes = positive, negative + BETA

    def __call__(self, x: Tensor) -> Tensor:
        assert self._slopes is not None, "load the weights first"
        wide, (positive, negative) = x.float(), self._slopes
        below = (torch.expm1(wide.clamp(max=EPS)) - wide) * negative
        return (torch.where(wide > 0, positive * wide * wide, below) + BETA * wide).to(x.dtype)
