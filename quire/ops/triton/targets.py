"""The devices on which the kernels run, and the precision of their products."""

import torch
import triton

from quire.ops.registry import Target
from quire.ops.triton.cache import use_default_folder
from quire.platform.gpu.cards import Card

INTERPRETED: bool = triton.knobs.runtime.interpret
if not INTERPRETED:
    use_default_folder()


def precision(dtype: torch.dtype) -> str:
    """Return the value of PRECISION for `multiplied`."""
    return "ieee" if dtype is torch.float32 else "tf32"


def overlaps_launches(card: Card) -> bool:
    """Return whether kernels that follow each other use programmatic dependent launch: the programs of the next kernel
    start while the last ones of this kernel run, and wait (`gdc_wait`) until its results are complete. This hides the
    time between two launches. Hopper and later cards of NVIDIA support it."""
    return isinstance(card.capability, int) and card.capability >= 90 and card.backend == "cuda" and not INTERPRETED


def on_gpu(target: Target) -> bool:
    return target.device.type == "cuda" and target.dtype in (torch.float32, torch.bfloat16, torch.float16)


def on_gpu_in_any_batch(target: Target) -> bool:
    """Return whether to use an implementation that is slower but batch-invariant: only if the target requires it."""
    return on_gpu(target) and target.batch_invariant
