"""Chooses the attention backend of a model."""

from quire.attention.base import AttentionBackend, AttentionShape
from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention
from quire.observability.logging import logger
from quire.ops import HAS_TRITON

BACKENDS: list[type[AttentionBackend]] = [CpuAttention, ReferenceAttention]  # best first
if HAS_TRITON:
    from quire.attention.triton.backends import BACKENDS as TRITON_BACKENDS

    BACKENDS = [*TRITON_BACKENDS, *BACKENDS]

# vLLM's names, with the nearest backends of Quire. They are only preferences, so a command line with one always starts.
VLLM_BACKENDS: dict[str, tuple[str, ...]] = {
    "CPU_ATTN": ("cpu",),
    "TORCH_SDPA": ("cpu",),
    "TRITON_ATTN": ("triton",),
    "TRITON_MLA": ("triton",),
    "FLASH_ATTN": ("flash-attn-3", "flash-attn-4", "flash-attn"),
    "FLASHINFER": ("flashinfer",),
    **dict.fromkeys(
        """CUTLASS_MLA FLASHINFER_MLA FLASHINFER_MLA_SPARSE FLASHMLA FLASHMLA_SPARSE FLASH_ATTN_DIFFKV
        FLASH_ATTN_MLA FLEX_ATTENTION IPEX PALLAS ROCM_AITER_FA ROCM_AITER_MLA ROCM_AITER_MLA_SPARSE
        ROCM_AITER_TRITON_MLA ROCM_AITER_UNIFIED_ATTN ROCM_ATTN TREE_ATTN XFORMERS""".split(),
        (),
    ),
}


def choose_backend(shape: AttentionShape, pinned: str | None = None) -> AttentionBackend:
    """Return the best backend that supports the shape, or the pinned one. Raises ValueError if the pinned one does
    not."""
    if pinned is not None and pinned.upper() in VLLM_BACKENDS:
        near = VLLM_BACKENDS[pinned.upper()]
        for backend in BACKENDS:
            if backend.name in near and backend.unsupported(shape) is None:
                return backend(shape)
        chosen = choose_backend(shape)
        logger.warning("attention_backend=%s cannot be used here; %s takes its place", pinned, chosen.name)
        return chosen
    reasons: list[str] = []
    for backend in BACKENDS:
        if pinned in (None, backend.name):
            reason = backend.unsupported(shape)
            if reason is None:
                return backend(shape)
            if pinned is not None:
                raise ValueError(f"attention_backend={pinned!r} cannot be used: {reason}")
            reasons.append(f"{backend.name}: {reason}")
    if reasons:
        raise ValueError(f"no attention backend can be used; {'; '.join(reasons)}")
    raise ValueError(f"no attention_backend {pinned!r}; there are: {', '.join(b.name for b in BACKENDS)}")
