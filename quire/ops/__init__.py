"""The operations of the forward pass and the sampler, and their implementations."""

import quire.ops.cpu.elementwise
import quire.ops.cpu.linear
import quire.ops.cpu.sampling
import quire.ops.reference.quantized  # noqa: F401  (importing registers; nothing is compiled before an engine chooses)
from quire.ops.registry import OPS, Kernels, Op, Target, declare

__all__ = ["OPS", "Kernels", "Op", "Target", "declare"]
