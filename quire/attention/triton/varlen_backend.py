"""Attention with kernels of other libraries, for steps that consist of whole prompts.

These kernels read the keys and values that were just computed, not the cache. All other steps, and options that the
kernels lack, use the Triton backend.
"""

import importlib.util
import inspect
from abc import abstractmethod
from functools import cache
from typing import Any, Unpack

import torch
from torch import Tensor

from quire.attention.base import AttentionShape, Preparation, Scores, StepLayout
from quire.attention.triton.attention_backend import TritonAttention, TritonPlan


class VarlenAttention(TritonAttention):
    """The base of these backends. They support neither caches of cells nor latent caches."""

    soft_caps = False  # whether the library supports soft caps

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._stored: tuple[Tensor, Tensor, Tensor] | None = None  # a cache, and the keys and values last stored in it

    @classmethod
    def unsupported(cls, shape: AttentionShape) -> str | None:
        if shape.batch_invariant:
            return f"the {cls.name} backend computes whole prompts in another way than chunks of them (batch_invariant)"
        if reason := super().unsupported(shape) or cls.missing(shape):
            return reason
        if shape.value_dim is not None or shape.cell is not None:
            return f"the {cls.name} backend supports neither latent caches nor caches of cells"
        if shape.dtype is torch.float32 or shape.head_dim % 8 or shape.head_dim > 256:
            return f"the {cls.name} backend does not support heads of {shape.head_dim} in {shape.dtype}"
        return None

    @classmethod
    def missing(cls, shape: AttentionShape) -> str | None:
        """Return why the library cannot be used on the device, or None if it can."""
        if shape.device.type != "cuda" or torch.cuda.get_device_capability(shape.device) < (8, 0):
            return f"the {cls.name} backend needs a GPU of NVIDIA's Ampere generation or a later one"
        return None

    @abstractmethod
    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, layout: StepLayout, scale: float, window: int | None, soft_cap: float
    ) -> tuple[Tensor, Tensor]:
        """Return causal attention within each prompt: [tokens, heads, head_dim], and its lse as [heads, tokens].

        soft_cap: 0 for none.
        """

    def store(self, cache: Tensor, k: Tensor, v: Tensor | None, plan: TritonPlan) -> None:
        super().store(cache, k, v, plan)
        self._remember(cache, k, v, plan)

    def prepare(self, cache: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: TritonPlan, prep: Preparation) -> None:
        super().prepare(cache, q, k, v, plan, prep)
        self._remember(cache, k, v, plan)

    def _remember(self, cache: Tensor, k: Tensor, v: Tensor | None, plan: TritonPlan) -> None:
        self._stored = (cache, k, v) if plan.layout.longest_prompt and v is not None else None

    def attend(self, q: Tensor, cache: Tensor, plan: TritonPlan, **scores: Unpack[Scores]) -> tuple[Tensor, Tensor]:
        stored = self._stored
        soft_cap = scores.get("soft_cap") or 0.0
        is_plain = scores.get("sinks") is None and scores.get("bias") is None
        supported = is_plain and (self.soft_caps or not soft_cap)
        if stored is None or stored[0] is not cache or not plan.layout.longest_prompt or not supported:
            return super().attend(q, cache, plan, **scores)
        out, lse = self.varlen(q, stored[1], stored[2], plan.layout, scores["scale"], scores.get("window"), soft_cap)
        return out, lse.T


class TorchVarlenAttention(VarlenAttention):
    """torch's kernel: FlashAttention-2 (arXiv:2307.08691), or a later version that is registered with torch."""

    name = "torch-varlen"

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, layout: StepLayout, scale: float, window: int | None, soft_cap: float
    ) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        starts = layout.query_start_loc
        longest = layout.longest_prompt
        extra: dict[str, Any] = {"enable_gqa": True} if _asks_for_gqa() else {}
        size = (-1 if window is None else window - 1, 0)
        return varlen_attn(  # type: ignore[return-value]
            q,
            k,
            v,
            starts,
            starts,
            longest,
            longest,
            scale=scale,
            window_size=size,
            return_aux=AuxRequest(lse=True),
            **extra,
        )


@cache
def _asks_for_gqa() -> bool:
    """Whether torch needs the argument enable_gqa for fewer KV heads than query heads. torch 2.11 does not."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


class FlashAttention(VarlenAttention):
    """The kernels of the package flash-attn, if it is installed."""

    name = "flash-attn"
    soft_caps = True

    @classmethod
    def missing(cls, shape: AttentionShape) -> str | None:
        if importlib.util.find_spec("flash_attn") is None:
            return "the package flash-attn is not installed"
        return super().missing(shape)

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, layout: StepLayout, scale: float, window: int | None, soft_cap: float
    ) -> tuple[Tensor, Tensor]:
        from flash_attn import flash_attn_varlen_func

        starts = layout.query_start_loc
        longest = layout.longest_prompt
        out, lse, _ = flash_attn_varlen_func(
            q,
            k,
            v,
            starts,
            starts,
            longest,
            longest,
            softmax_scale=scale,
            causal=True,
            window_size=(-1 if window is None else window - 1, -1 if window is None else 0),
            softcap=soft_cap,
            return_attn_probs=True,
        )
        return out, lse
