"""The attention backends for GPUs, the best first."""

from quire.attention.base import AttentionBackend
from quire.attention.triton.attention_backend import TritonAttention
from quire.attention.triton.varlen_backend import FlashAttention, TorchVarlenAttention

BACKENDS: list[type[AttentionBackend]] = [TritonAttention, FlashAttention, TorchVarlenAttention]
