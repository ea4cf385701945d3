"""Quire's paged attention as an attention function of transformers.

https://huggingface.co/docs/transformers/attention_interface
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quire.attention.base import AttentionBackend

NAME = "quire"  # among transformers' attention functions


@dataclass
class Step:
    """State shared by all layers. plans: for each KV group, the plan of the current step. slots: the slots of the
    tokens' adapters, None if no token has one; see ForwardState."""

    plans: list[Any] = field(default_factory=list)
    slots: Tensor | None = None


@dataclass
class PagedAttention:
    """The attention of one layer: its place in the cache. head_dim: of cached keys and values; see `_rows`."""

    step: Step
    group: int
    head_dim: int
    window: int | None
    backend: AttentionBackend | None = None
    cache: Tensor | None = None

    def bind(self, backend: AttentionBackend, cache: Tensor) -> None:
        """Called once the cache's size is known."""
        self.backend = backend
        self.cache = cache

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, soft_cap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """query, key, value: [1, heads or kv_heads, tokens, dim] -> [1, tokens, heads, dim of the values]"""
        backend = self.backend
        cache = self.cache
        plan = self.step.plans[self.group]
        assert backend is not None, "bind the cache first"
        assert cache is not None
        q, k, v = (_rows(x, self.head_dim, backend.shape.dtype) for x in (query, key, value))
        backend.store(cache, k, v, plan)
        sinks = None if sinks is None else sinks.float()
        out, _ = backend.attend(q, cache, plan, scale=scale, window=self.window, soft_cap=soft_cap, sinks=sinks)
        return out[None, :, :, : value.shape[-1]].to(query.dtype)


def _rows(x: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """[1, heads, tokens, dim] -> [tokens, heads, head_dim], with shorter vectors padded with zeros: in some models,
    values are shorter than keys. Zeros change no product."""
    x = torch.nn.functional.pad(x, (0, head_dim - x.shape[-1]))
    return x[0].transpose(0, 1).to(dtype).contiguous()


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The argument names are transformers'. The other arguments were checked by the probe, or have no effect."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return module.quire_attention(query, key, value, scale, softcap, s_aux), None


def register() -> None:
    """Register the function with transformers. No mask function is registered, so transformers creates no masks for
    it."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
