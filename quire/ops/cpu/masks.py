"""Masks of the tokens that may be sampled, applied in C++ (masks.cpp)."""

import torch
from torch import Tensor

from quire.ops.cpu.build import CODES, kernel
from quire.ops.cpu.elementwise import on_cpu
from quire.ops.reference.masks import apply_token_masks


@apply_token_masks.implementation("cpu", supports=on_cpu)
def apply_token_masks_cpu(logits: Tensor, places: Tensor, bits: Tensor) -> Tensor:
    if logits.stride(1) != 1 or logits.dtype not in CODES:
        return apply_token_masks.reference(logits, places, bits)  # type: ignore[no-any-return]
    kernel("quire_apply_token_masks", "ipllplpi")(
        CODES[logits.dtype],
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        places.data_ptr(),
        len(places),
        bits.data_ptr(),
        torch.get_num_threads(),
    )
    return logits
