"""Which attention backend serves a model."""

from quire.attention.base import AttentionBackend, AttentionShape
from quire.attention.cpu import CpuAttention
from quire.attention.reference import ReferenceAttention
from quire.ops import HAS_TRITON

BACKENDS: list[type[AttentionBackend]] = [CpuAttention, ReferenceAttention]  # best first
if HAS_TRITON:
    from quire.attention.triton import TritonAttention
    from quire.attention.varlen import FlashAttention, TorchVarlenAttention

    BACKENDS = [TritonAttention, FlashAttention, TorchVarlenAttention, *BACKENDS]


def choose_backend(shape: AttentionShape, pinned: str | None = None) -> AttentionBackend:
    """The best backend that supports the shape, or the pinned one. Raises ValueError if that one cannot."""
    for backend in BACKENDS:
        if pinned in (None, backend.name):
            reason = backend.unsupported(shape)
            if reason is None:
                return backend(shape)
            if pinned is not None:
                raise ValueError(f"attention_backend={pinned!r} cannot be used: {reason}")
    raise ValueError(f"no attention_backend {pinned!r}; there are: {', '.join(b.name for b in BACKENDS)}")
