"""Linear biases on attention scores by the distance between query and key."""

import torch
from torch import Tensor

from quire.layers.build import Builder


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of each head: a geometric series. Heads beyond a power of two use every other slope of the next
    finer one."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2.0 ** (-4 * (i + 1) / power) for i in range(0, 2 * (num_heads - power), 2)]


class AlibiSlopes:
    """Attention with linear biases (arXiv:2108.12409) adds slope * (position of the key) to the scores of a head.

    Backends need no support for it, since it becomes part of the dot product: every head gets two more elements. The
    query holds the slope twice. The key holds its position in two digits, which are exact in bfloat16 up to 65,536:
    1,000 becomes 768 and 232. Values get zeros.
    """

    def __init__(self, num_heads: int, heads: range, builder: Builder, scale: float = 1.0) -> None:
        """scale: the factor of the scores by which slopes are divided, so that it does not apply to them."""
        slopes = alibi_slopes(num_heads)[heads.start : heads.stop]
        self.slopes = torch.tensor([slope / scale for slope in slopes], dtype=builder.dtype, device=builder.device)
        self.kernels = builder.kernels

    def extend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v: [tokens, heads, head_dim], positions: [tokens] -> [tokens, heads, head_dim + 2] each"""
        longer: tuple[Tensor, Tensor, Tensor] = self.kernels.append_positions(q, k, v, self.slopes, positions)
        return longer

    def without(self, out: Tensor) -> Tensor:
        """Remove the added elements from attention's result: [tokens, heads, head_dim + 2] -> [tokens, heads,
        head_dim]"""
        values: Tensor = self.kernels.join(out[..., :-2], out[..., :0])
        return values
