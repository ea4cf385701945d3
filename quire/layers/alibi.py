"""Linear biases on attention scores by the distance between query and key."""

import torch
from torch import Tensor

from quire.layers.build import Builder


class AlibiSlopes:
    """Attention with linear biases (arXiv:2108.12409): a head's scores grow by slope * (position of the key).

    No backend knows of it: every head gets two more elements, slopes in the query and the position in the key, in two
    digits so that bfloat16 holds it exactly up to 65,536. The values get zeros.
    """

    def __init__(self, num_heads: int, heads: range, builder: Builder) -> None:
        """Slopes are a geometric series; beyond a power of two, every other one of the next finer series."""
        power = 1 << (num_heads.bit_length() - 1)
        slopes = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
        slopes += [2.0 ** (-4 * (i + 1) / power) for i in range(0, 2 * (num_heads - power), 2)]
        mine = torch.tensor(slopes[heads.start : heads.stop], dtype=builder.dtype, device=builder.device)
        self.slopes = mine[None, :, None].expand(1, -1, 2)  # [1, heads, 2]

    def extend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v: [tokens, heads, head_dim], positions: [tokens] -> [tokens, heads, head_dim + 2] each"""
        low = positions & 255
        digits = torch.stack([positions - low, low], dim=-1).to(k.dtype)[:, None]  # [tokens, 1, 2]
        slopes, digits = self.slopes.expand(len(q), -1, -1), digits.expand(-1, k.shape[1], -1)
        return torch.cat([q, slopes], -1), torch.cat([k, digits], -1), torch.nn.functional.pad(v, (0, 2))
