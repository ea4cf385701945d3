"""Attention with kernels of other libraries that read the paged cache, for prompts, chunks of them, and mixed steps.

Steps in which all requests have one or a few tokens use the Triton kernel: it splits the keys of long requests, and
CUDA graphs of it are valid for all lengths. So do steps with options that a library lacks. The cache is that of the
Triton backend, whose keys and values are passed as strided views.
"""

import importlib
import importlib.util
from abc import abstractmethod
from functools import cache as cached
from typing import Any, Unpack

import torch
from torch import Tensor

from quire.attention.base import AttentionShape, Scores, StepLayout
from quire.attention.triton.attention_backend import TritonAttention, TritonPlan
from quire.platform.gpu.cards import card_of


class PagedAttention(TritonAttention):
    """The base of these backends. They support neither caches of cells nor latent caches."""

    modules: tuple[str, ...]  # any of these provides the kernels; the first one that is installed is used
    capabilities: tuple[int, ...]
    soft_caps = True
    sinks = False

    @classmethod
    def unsupported(cls, shape: AttentionShape) -> str | None:
        if cls.module() is None:
            return f"none of these is installed: {', '.join(cls.modules)}"
        if reason := super().unsupported(shape):
            return reason
        if shape.batch_invariant:
            return f"results of the {cls.name} backend depend on the batch (batch_invariant)"
        if shape.value_dim is not None or shape.cell is not None or shape.by_slot:
            return f"the {cls.name} backend supports neither latent caches nor caches of cells"
        capability = card_of(shape.device).capability
        if capability not in cls.capabilities:
            return f"the {cls.name} backend does not support cards of compute capability {capability}"
        if shape.dtype is torch.float32 or shape.head_dim % 8 or shape.head_dim > 256:
            return f"the {cls.name} backend does not support heads of {shape.head_dim} in {shape.dtype}"
        return cls.lacking(shape)

    @classmethod
    def module(cls) -> str | None:
        """Return the name of the installed module."""
        return next((name for name in cls.modules if importlib.util.find_spec(name.partition(".")[0])), None)

    @classmethod
    def lacking(cls, shape: AttentionShape) -> str | None:
        """Return what the installed build of the library lacks for the shape, or None."""
        return None

    @abstractmethod
    def paged(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: TritonPlan, scale: float, window: int | None, cap: float
    ) -> tuple[Tensor, Tensor]:
        """Return causal attention: [tokens, heads, head_dim], and its lse (natural) as [tokens, heads].

        keys, values: [blocks, block_size, kv_heads, head_dim], with any strides but the last. cap: the soft cap, 0 for
        none.
        """

    def supports_step(self, plan: TritonPlan, scores: Scores) -> bool:
        is_plain = scores.get("sinks") is None and scores.get("bias") is None
        return not plan.one_tile and is_plain and (self.soft_caps or not scores.get("soft_cap"))

    def attend(self, q: Tensor, cache: Tensor, plan: TritonPlan, **scores: Unpack[Scores]) -> tuple[Tensor, Tensor]:
        if not len(q) or not self.supports_step(plan, scores):
            return super().attend(q, cache, plan, **scores)
        s = self.shape
        planes = cache.view(len(cache), s.num_kv_heads, 2, s.block_size, s.head_dim).transpose(1, 3)
        keys, values = planes.unbind(2)  # each [blocks, block_size, kv_heads, head_dim]
        q = q if q.stride(-1) == 1 else q.contiguous()
        return self.paged(q, keys, values, plan, scores["scale"], scores.get("window"), scores.get("soft_cap") or 0.0)


class FlashAttention3(PagedAttention):
    """FlashAttention-3 (arXiv:2407.08608): `flash_attn_interface`, built from the folder hopper of flash-attention.

    The wheel fa3-fwd 0.0.3 is built without paged caches, so it does not suffice. The builds list what they lack.
    """

    name = "flash-attn-3"
    modules = ("flash_attn_interface", "fa3_fwd_interface")
    capabilities = (90,)

    @classmethod
    def lacking(cls, shape: AttentionShape) -> str | None:
        flags = _build_flags(str(cls.module()))
        if flags.get("FLASHATTENTION_DISABLE_PAGEDKV") or flags.get("FLASHATTENTION_DISABLE_VARLEN"):
            return f"{cls.module()} was built without paged caches"
        if shape.dtype is torch.float16 and flags.get("FLASHATTENTION_DISABLE_FP16"):
            return f"{cls.module()} was built without float16"
        return None

    def supports_step(self, plan: TritonPlan, scores: Scores) -> bool:
        flags = _build_flags(str(self.module()))
        is_local = scores.get("window") is not None and flags.get("FLASHATTENTION_DISABLE_LOCAL", False)
        capped = scores.get("soft_cap") and flags.get("FLASHATTENTION_DISABLE_SOFTCAP", False)
        return super().supports_step(plan, scores) and not is_local and not capped

    def paged(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: TritonPlan, scale: float, window: int | None, cap: float
    ) -> tuple[Tensor, Tensor]:
        layout = plan.layout
        out, lse, *_ = importlib.import_module(str(self.module())).flash_attn_with_kvcache(
            q,
            keys,
            values,
            cache_seqlens=layout.seq_lens,
            page_table=layout.block_table,
            cu_seqlens_q=layout.query_start_loc,
            max_seqlen_q=longest_of(layout, len(q)),
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=cap,
            return_softmax_lse=True,
        )
        return out, lse.T


class FlashAttention4(PagedAttention):
    """FlashAttention-4, in CuTe's Python language: `flash_attn.cute`, for Blackwell's data-centre cards."""

    name = "flash-attn-4"
    modules = ("flash_attn.cute",)
    capabilities = (100, 103)

    @classmethod
    def module(cls) -> str | None:
        found = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")
        return "flash_attn.cute.interface" if found else None

    @classmethod
    def lacking(cls, shape: AttentionShape) -> str | None:
        if shape.block_size != _PAGE_OF_FA4:
            return f"flash_attn.cute reads pages of {_PAGE_OF_FA4} tokens, not {shape.block_size} (block_size)"
        return None if shape.head_dim in (64, 96, 128) else f"flash_attn.cute has no heads of {shape.head_dim}"

    def paged(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: TritonPlan, scale: float, window: int | None, cap: float
    ) -> tuple[Tensor, Tensor]:
        layout = plan.layout
        out, lse, *_ = importlib.import_module(str(self.module())).flash_attn_varlen_func(
            q,
            keys,
            values,
            cu_seqlens_q=layout.query_start_loc,
            seqused_k=layout.seq_lens,
            page_table=layout.block_table,
            softmax_scale=scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
            softcap=cap,
            return_lse=True,
        )
        return out, lse.T


class FlashInfer(PagedAttention):
    """FlashInfer's batch prefill over pages (arXiv:2501.01005). Its plan reads lengths on the host, so the host waits
    once a step. It is used only if it is named."""

    name = "flashinfer"
    modules = ("flashinfer",)
    capabilities = (80, 86, 89, 90, 100, 103, 120, 121)
    capturable = False
    _workspace: Tensor | None = None

    def plan(self, layout: StepLayout, previous: TritonPlan | None = None) -> TritonPlan:
        plan = super().plan(layout, previous)
        plan.library.clear()
        return plan

    def paged(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: TritonPlan, scale: float, window: int | None, cap: float
    ) -> tuple[Tensor, Tensor]:
        options = scale, window, cap
        if options not in plan.library:
            plan.library[options] = self._wrapper(plan.layout, q, scale, window, cap)
        out, lse = plan.library[options].run(q, (keys, values), return_lse=True)
        return out, lse * _LN_2  # exponents of two

    def _wrapper(self, layout: StepLayout, q: Tensor, scale: float, window: int | None, cap: float) -> Any:
        """Return a wrapper that has planned the step."""
        flashinfer = importlib.import_module("flashinfer")
        s = self.shape
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=q.device)
        lengths = layout.seq_lens
        pages = (lengths + s.block_size - 1) // s.block_size
        column = torch.arange(layout.block_table.shape[1], device=q.device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="NHD")
        wrapper.plan(
            layout.query_start_loc,
            torch.nn.functional.pad(pages.cumsum(0, dtype=torch.int32), (1, 0)),
            layout.block_table[column < pages[:, None]],
            torch.where(lengths > 0, (lengths - 1) % s.block_size + 1, 0).int(),
            s.num_heads,
            s.num_kv_heads,
            s.head_dim,
            s.block_size,
            causal=True,
            sm_scale=scale,
            window_left=-1 if window is None else window - 1,
            logits_soft_cap=cap,
            q_data_type=q.dtype,
            kv_data_type=s.dtype,
        )
        return wrapper


_PAGE_OF_FA4 = 128
_WORKSPACE = 128 << 20
_LN_2 = 0.6931471805599453


def longest_of(layout: StepLayout, tokens: int) -> int:
    """Return an upper bound of a request's tokens in the step. Lengths are on the device."""
    return layout.longest_prompt or layout.tokens_per_request or tokens


@cached
def _build_flags(module: str) -> dict[str, bool]:
    """Return the flags with which FlashAttention-3 was built, which are in a module beside it."""
    name = {"flash_attn_interface": "flash_attn_config", "fa3_fwd_interface": "fa3_fwd_config"}[module]
    if importlib.util.find_spec(name) is None:
        return {}
    flags: dict[str, bool] = importlib.import_module(name).CONFIG["build_flags"]
    return flags
