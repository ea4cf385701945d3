"""The devices on which the kernels run, and the precision of their products."""

import torch
import triton

from quire.ops.registry import Target
from quire.ops.triton.cache import use_default_folder

INTERPRETED: bool = triton.knobs.runtime.interpret
if not INTERPRETED:
    use_default_folder()


def precision(dtype: torch.dtype) -> str:
    """Return the value of PRECISION for `multiplied`."""
    return "ieee" if dtype is torch.float32 else "tf32"


def on_gpu(target: Target) -> bool:
    return target.device.type == "cuda" and target.dtype in (torch.float32, torch.bfloat16, torch.float16)


def on_gpu_in_any_batch(target: Target) -> bool:
    """Return whether to use an implementation that is slower but batch-invariant: only if the target requires it."""
    return on_gpu(target) and target.batch_invariant
