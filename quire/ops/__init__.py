"""The operations of the forward pass and the sampler, and their implementations."""

from importlib.util import find_spec

import torch

import quire.ops.cpu.elementwise
import quire.ops.cpu.linear
import quire.ops.cpu.quantized_linear
import quire.ops.cpu.sampling  # importing registers; nothing is compiled before an engine chooses
from quire.ops.registry import OPS, Kernels, Op, Target, declare

HAS_TRITON = torch.cuda.is_available() and find_spec("triton") is not None  # importing it takes a while, so not before
if HAS_TRITON:
    import quire.ops.triton.elementwise
    import quire.ops.triton.linear
    import quire.ops.triton.sampling  # noqa: F401

__all__ = ["HAS_TRITON", "OPS", "Kernels", "Op", "Target", "declare"]
