"""The operations of the forward pass and the sampler, and their implementations."""

from importlib.util import find_spec

import torch

import quire.ops.cpu.drafts
import quire.ops.cpu.elementwise
import quire.ops.cpu.encoder_attention
import quire.ops.cpu.heads
import quire.ops.cpu.linear
import quire.ops.cpu.lora
import quire.ops.cpu.masks
import quire.ops.cpu.quantized_linear
import quire.ops.cpu.routing
import quire.ops.cpu.sampling
import quire.ops.cpu.states
import quire.ops.reference.batch  # the imports register ops; nothing is compiled until an engine chooses
import quire.ops.reference.drafts
from quire.observability.logging import logger
from quire.ops import launchers
from quire.ops.registry import OPS, Kernels, Op, Target, declare


def triton_works() -> bool:
    """Return whether there is a GPU and everything that Triton needs to launch kernels on it. This does not import
    Triton, which would be slow."""
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    if launchers.find_compiler() is not None or launchers.are_compiled():
        return True
    logger.warning(
        "Triton finds no C compiler, which it needs; without gcc or clang, or what quire compile makes, the GPU runs "
        "torch's operations only"
    )
    return False


HAS_TRITON = triton_works()
if HAS_TRITON:
    import quire.ops.triton.kernels  # noqa: F401  # registers them

__all__ = ["HAS_TRITON", "OPS", "Kernels", "Op", "Target", "declare"]
