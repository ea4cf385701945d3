"""Attention within whole sequences, for models without a cache."""

from itertools import pairwise

import torch
from torch import Tensor

from quire.ops.registry import ANYWHERE, declare_invariant


def bias_of(bias: Tensor, ahead: Tensor) -> Tensor:
    """bias: see AttentionBackend.attend. ahead: distances from queries to keys, [queries, keys] -> [heads, queries,
    keys]"""
    reach = bias.shape[1] // 2
    return bias[:, ahead.clamp(-reach, reach) + reach]


@declare_invariant(*ANYWHERE)  # each sequence is computed separately
def encoder_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float, reach: int | None, bias: Tensor | None = None
) -> Tensor:
    """Attention of each token to the tokens of its own sequence, before it and after it.

    q: [tokens, heads, dim]; k, v: [tokens, kv_heads, dim], any strides over tokens and heads; starts: [sequences + 1],
    int32, where each sequence begins. Tokens after the last sequence are padding, with arbitrary results. reach: the
    number of tokens that a token sees on each side, None for all. bias: the biases of scores by distance, see
    AttentionBackend.attend. -> [tokens, heads, dim], contiguous.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for start, stop in pairwise(starts.tolist()):
        if start == stop:
            continue
        places = torch.arange(stop - start, device=q.device)
        ahead = places - places[:, None]
        mask = None if reach is None else ahead.abs() <= reach
        queries, keys, values = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        if bias is not None:
            added = bias_of(bias, ahead)
            mask = added if mask is None else added.masked_fill(~mask, float("-inf"))
            queries = queries.float()
            keys = keys.float()
            values = values.float()
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, mask, scale=scale, enable_gqa=True
        )
        out[start:stop] = attended[0].transpose(0, 1)
    return out
