"""The attention backends for GPUs, the best first."""

from quire.attention.base import AttentionBackend
from quire.attention.triton.attention_backend import TritonAttention
from quire.attention.triton.paged_backend import FlashAttention3, FlashAttention4, FlashInfer
from quire.attention.triton.varlen_backend import FlashAttention, TorchVarlenAttention

BACKENDS: list[type[AttentionBackend]] = [
    FlashAttention3,
    FlashAttention4,
    TritonAttention,
    FlashInfer,
    FlashAttention,
    TorchVarlenAttention,
]
