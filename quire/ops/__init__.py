"""The operations of the forward pass and the sampler, and their implementations."""

import quire.ops.cpu.elementwise
import quire.ops.cpu.linear
import quire.ops.cpu.quantized_linear
import quire.ops.cpu.sampling  # noqa: F401  (importing registers; nothing is compiled before an engine chooses)
from quire.ops.registry import OPS, Kernels, Op, Target, declare

__all__ = ["OPS", "Kernels", "Op", "Target", "declare"]
