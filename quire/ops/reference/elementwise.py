"""Norms, activations, rotary embedding, sums of experts' and partial results, and products with dense weights."""

from itertools import pairwise

import torch
from torch import Tensor

from quire.ops.registry import ANYWHERE, declare, declare_invariant


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype) if weight.dtype == x.dtype else (weight * wide).to(x.dtype)


@declare
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32 (arXiv:1910.07467).

    x: [..., dim], any strides over the leading dimensions; weight: [dim]. Returns a contiguous [..., dim] of x's dtype.
    With a weight of x's dtype, the normed x is rounded to that dtype before the product (as Llama does). With a float32
    weight, only the product is rounded (Gemma, OLMo 2, gpt-oss).
    """
    return _norm(x, weight, eps)


@declare
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream, then norm: (rms_norm(x + residual), x + residual). x, residual: [tokens, dim].

    Both arguments may be overwritten, so use only the returned tensors.
    """
    residual = x + residual
    return _norm(residual, weight, eps), residual


@declare_invariant("cuda")
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Norm by mean and variance over the last dimension, computed in float32 (arXiv:1607.06450).

    x: [..., dim]; weight, bias: [dim] of x's dtype -> [..., dim], contiguous. For x: [tokens, heads, dim], each head
    may have a weight of its own, [heads, dim].
    """
    if weight is not None and weight.dim() == 2:
        return (torch.nn.functional.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight).to(x.dtype)
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


@declare_invariant("cuda")
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add to the residual stream, then norm: (layer_norm(x + residual), x + residual). x, residual: [tokens, dim].

    Both arguments may be overwritten, so use only the returned tensors.
    """
    residual = x + residual
    return torch.nn.functional.layer_norm(residual, residual.shape[-1:], weight, bias, eps), residual


@declare_invariant(*ANYWHERE)
def add(x: Tensor, residual: Tensor, out: Tensor) -> Tensor:
    """Write x + residual to `out` and return `out`. All are [tokens, dim] and of one type."""
    return torch.add(x, residual, out=out)


@declare_invariant(*ANYWHERE)
def multiply(x: Tensor, factor: Tensor | float) -> Tensor:
    """Multiply x by a number, a row of numbers [dim], a number for each row [rows, 1], or one for each element [rows,
    dim], rounded once. x: [rows, dim]."""
    return (x.float() * factor).to(x.dtype)


@declare_invariant(*ANYWHERE)
def lerp(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    """x + (other - x) * weight, in float32, for each of several weights. x, other: [tokens, dim]; weight: [mixes, 1
    or tokens, dim], float32 or of x's type -> [mixes, tokens, dim]."""
    wide = x.float()
    return (wide + (other.float() - wide) * weight).to(x.dtype)


@declare_invariant("cuda")
def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[:, :half]) * x[:, half:], the gated activation of Llama's MLP. x: [tokens, 2 * half] -> [tokens, half]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@declare_invariant("cuda")
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """gelu(x[:, :half]) * x[:, half:], the gated activation of Gemma's MLP. x: [tokens, 2 * half] -> [tokens, half].

    approximate: "none" uses the error function, "tanh" its usual approximation (arXiv:1606.08415).
    """
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


@declare_invariant("cuda")
def swiglu_oai(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """The clamped gated activation of gpt-oss, in float32: (up + 1) * gate * sigmoid(alpha * gate).

    x: [tokens, 2 * half] -> [tokens, half]; gate = x[:, :half] up to limit, up = x[:, half:] within -limit ... limit.
    """
    gate, up = x.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(x.dtype)


@declare_invariant("cuda")
def limited_swiglu(x: Tensor, limit: float, after: bool = False) -> Tensor:
    """silu(gate) * up with limits, in float32. x: [tokens, 2 * half] -> [tokens, half].

    gate = x[:, :half] up to limit, up = x[:, half:] within -limit ... limit. after: the limit of the gate applies to
    silu(gate) instead (Step 3.5).
    """
    gate, up = x.float().chunk(2, dim=-1)
    gate = torch.nn.functional.silu(gate).clamp(max=limit) if after else torch.nn.functional.silu(gate.clamp(max=limit))
    return (gate * up.clamp(-limit, limit)).to(x.dtype)


@declare_invariant(*ANYWHERE)
def relu_and_mul(x: Tensor, squared: bool = False) -> Tensor:
    """relu(x[:, :half]) * x[:, half:], or the square of relu. x: [tokens, 2 * half] -> [tokens, half]."""
    gate, up = x.chunk(2, dim=-1)
    return (gate.relu().square() if squared else gate.relu()) * up


@declare_invariant("cuda")
def xielu(x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """The activation xIELU (arXiv:2411.13010), in float32. For x > 0: positive * x^2 + x / 2; otherwise negative *
    (e^min(x, -1e-6) - 1 - x) + x / 2. x: [rows, dim]; positive, negative: [1], float32."""
    wide = x.float()
    below = (torch.expm1(wide.clamp(max=-1e-6)) - wide) * negative
    return (torch.where(wide > 0, positive * wide * wide, below) + wide / 2).to(x.dtype)


@declare_invariant(*ANYWHERE)
def clip(x: Tensor, most: float) -> Tensor:
    """Limit each element to -most ... most. x: [rows, dim] -> [rows, dim]."""
    return x.clamp(-most, most)


@declare_invariant("cuda")
def activate(x: Tensor, name: str) -> Tensor:
    """Apply an activation without a gate: "silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "relu" or "relu2", the square
    of relu. x: [rows, dim] -> [rows, dim]."""
    if name in ("relu", "relu2"):
        positive = x.relu()
        return positive if name == "relu" else positive.square()
    if name in ("gelu", "gelu_tanh"):
        return torch.nn.functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    if name in ("sigmoid", "tanh"):
        return torch.sigmoid(x) if name == "sigmoid" else torch.tanh(x)
    return torch.nn.functional.silu(x)


@declare_invariant(*ANYWHERE)
def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate the pairs of each head's first rotary_dim elements by their angles (arXiv:2104.09864).

    Pair i is the elements (i, i + rotary_dim / 2), or (2 i, 2 i + 1) where they are interleaved (GPT-J, Cohere, GLM-4,
    DeepSeek). q: [tokens, heads, head_dim], k: [tokens, kv_heads, head_dim], last dimension contiguous, may be
    overwritten; cos, sin: [tokens, rotary_dim / 2], float32, already gathered for the tokens' positions, and possibly
    scaled (YaRN). Products are computed in float32.
    """

    def rotate(x: Tensor) -> Tensor:
        half = cos.shape[-1]
        c = cos[:, None, :]
        s = sin[:, None, :]
        turned = x[..., : 2 * half].float()
        rest = x[..., 2 * half :]
        first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
        pairs = (first * c - second * s).to(x.dtype), (second * c + first * s).to(x.dtype)
        return torch.cat([torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, -1), rest], -1)

    return rotate(q), rotate(k)


@declare_invariant("cpu")
def row_sums(x: Tensor) -> Tensor:
    """Return the sum of each row, in float32. x: [rows, dim], any float type -> [rows, 1]."""
    return x.float().sum(-1, keepdim=True)


@declare
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b. x: [tokens, in], weight: [out, in], bias: [out] -> [tokens, out].

    An implementation may have two attributes. `pack` converts a weight to the form that the kernel reads fastest, and
    may reuse the weight's memory; layers call it once, after loading their weights. `rows(packed, ids)` returns a
    packed weight's rows for the outputs `ids`: [len(ids), in].
    """
    return torch.nn.functional.linear(x, weight, bias)


@declare_invariant(*ANYWHERE)
def join(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate the vectors of each head: [tokens, heads, a] and [tokens, heads, b] -> [..., a + b]."""
    return torch.cat([first, second], -1)


@declare_invariant("cuda")
def sharpen(q: Tensor, positions: Tensor, scale: float, length: int, offset: int) -> Tensor:
    """Multiply queries by 1 + scale * log(1 + (position + offset) // length), in float32 (Llama 4). q: [tokens, heads,
    dim]; positions: [tokens], int64."""
    lengths = (positions + offset) // length
    return (q * (1 + scale * torch.log1p(lengths.float()))[:, None, None]).to(q.dtype)


@declare_invariant(*ANYWHERE)
def append_positions(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Append two elements to each head of queries, keys and values, for linear biases: see layers/alibi.py. q, k, v:
    [tokens, heads, dim]; slopes: [heads] of q's type; positions: [tokens], int64 -> [tokens, heads, dim + 2] each."""
    low = positions & 255
    digits = torch.stack([positions - low, low], dim=-1).to(k.dtype)[:, None].expand(-1, k.shape[1], -1)
    twice = slopes[None, :, None].expand(len(q), -1, 2)
    return torch.cat([q, twice], -1), torch.cat([k, digits], -1), torch.nn.functional.pad(v, (0, 2))


@declare
def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """x_e W_e^T + b_e for each expert e, whose rows of x are offsets[e] : offsets[e + 1].

    x: [rows, in], sorted by expert; weight: [experts, out, in]; bias: [experts, out]; offsets: [experts + 1], int64,
    rising from 0 to rows -> [rows, out]. An implementation may have an attribute `pack`, like implementations of
    `linear`.
    """
    out = x.new_empty(len(x), weight.shape[1])
    bounds = offsets.tolist()
    for e, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            out[start:stop] = torch.nn.functional.linear(x[start:stop], weight[e], None if bias is None else bias[e])
    return out


@declare
def linear_by_head(x: Tensor, weight: Tensor) -> Tensor:
    """x_h W_h^T for each head h. x: [tokens, heads, in], weight: [heads, out, in] -> [tokens, heads, out]."""
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


@declare
def combine_experts(out: Tensor, order: Tensor, weights: Tensor | None) -> Tensor:
    """The weighted sum of the experts' results for each token.

    out: [tokens * top_k, dim], sorted by expert; order: [tokens * top_k], int64, token * top_k + choice of each row of
    out; weights: [tokens, top_k], float32, rounded to out's dtype first; None if each token has a single expert with
    the weight 1 -> [tokens, dim].
    """
    by_token = torch.empty_like(out)
    by_token[order] = out
    if weights is None:
        return by_token
    by_token = by_token.view(*weights.shape, out.shape[-1])  # [tokens, top_k, dim]
    return torch.bmm(weights.to(out.dtype)[:, None], by_token).squeeze(1)


@declare_invariant(*ANYWHERE)
def merge_partials(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge the results of attention over disjoint parts of the keys into the result for all keys.

    outs: [parts, tokens, heads, dim], lses: [parts, tokens, heads], float32: see AttentionBackend.attend. Where a query
    saw no key of a part, the lse is -inf and `out` may be anything. sinks: [heads], float32, sinks that no part
    includes. Returns out: [tokens, heads, dim], summed in float32, and lse: [tokens, heads]. The result of a query
    without keys is 0 and -inf. Flash-Decoding merges in this way (https://pytorch.org/blog/flash-decoding).
    """
    top = lses.amax(0) if sinks is None else torch.maximum(lses.amax(0), sinks)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = (lses - top).exp()
    total = weights.sum(0) if sinks is None else weights.sum(0) + (sinks - top).exp()
    weights = (weights / total.clamp(min=torch.finfo(torch.float32).tiny))[..., None]
    merged = torch.zeros(outs.shape[1:], dtype=torch.float32, device=outs.device)
    for out, weight in zip(outs, weights, strict=True):
        merged += torch.where(weight > 0, out * weight, 0.0)
    return merged.to(outs.dtype), total.log() + top
