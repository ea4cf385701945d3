"""The devices on which the kernels run, and the precision of their products."""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.registry import Target
from quire.ops.triton.cache import use_default_folder
from quire.platform.gpu.cards import Card, card_of

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


@cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Return the options for the launch of a kernel that begins with `wait_for_previous`."""
    return {"launch_pdl": True} if overlaps_launches(card_of(device)) else {}


@triton.jit
def wait_for_previous(OVERLAPPED: tl.constexpr):
    """Let the next kernel start, and wait for the results of the previous one. OVERLAPPED: see overlaps_launches."""
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()


def on_gpu(target: Target) -> bool:
    return target.device.type == "cuda" and target.dtype in (torch.float32, torch.bfloat16, torch.float16)


def on_gpu_in_any_batch(target: Target) -> bool:
    """Return whether to use an implementation that is slower but batch-invariant: only if the target requires it."""
    return on_gpu(target) and target.batch_invariant
