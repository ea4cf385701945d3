"""Norms, activations and rotary embedding: what happens between the matrix products."""

import torch
from torch import Tensor

from quire.ops.registry import declare


@declare
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32 (arXiv:1910.07467).

    x: [..., dim], any strides over the leading dimensions; weight: [dim]. Returns a contiguous [..., dim] of x's dtype.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@declare
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream, then norm: (rms_norm(x + residual), x + residual). x, residual: [tokens, dim].

    Both arguments may be overwritten; use only what is returned.
    """
    residual = x + residual
    wide = residual.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype), residual


@declare
def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[:, :half]) * x[:, half:], the gated activation of Llama's MLP. x: [tokens, 2 * half] -> [tokens, half]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@declare
def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate pairs (i, i + rotary_dim / 2) of each head's first rotary_dim elements (arXiv:2104.09864, "half" layout).

    q: [tokens, heads, head_dim], k: [tokens, kv_heads, head_dim], last dimension contiguous, may be overwritten;
    cos, sin: [tokens, rotary_dim / 2], float32, already gathered for the tokens' positions. Products in float32.
    """

    def rotate(x: Tensor) -> Tensor:
        half = cos.shape[-1]
        c, s = cos[:, None, :], sin[:, None, :]
        first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
        return torch.cat([(first * c - second * s).to(x.dtype), (second * c + first * s).to(x.dtype), rest], dim=-1)

    return rotate(q), rotate(k)


@declare
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b. x: [tokens, in], weight: [out, in], bias: [out] -> [tokens, out].

    An implementation may have an attribute `pack`, a function that turns a weight into the form it computes fastest
    from; layers call it once, when their weights are loaded.
    """
    return torch.nn.functional.linear(x, weight, bias)
