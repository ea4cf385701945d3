"""Bit masks of the tokens that a grammar allows."""

import torch
from torch import Tensor

from quire.ops.registry import ANYWHERE, declare_invariant


@declare_invariant(*ANYWHERE)
def apply_token_masks(logits: Tensor, places: Tensor, bits: Tensor) -> Tensor:
    """Set the logits of tokens that the masks forbid to minus infinity, in place. Returns `logits`.

    logits: [places, vocab], any float type; places: [masks], int64, the rows of logits that have a mask; bits: [masks,
    ceil(vocab / 32)], int32, contiguous. Token t may be sampled if bit t % 32 of word t // 32 is set.
    """
    expanded = bits[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = ((expanded & 1) == 0).flatten(1)[:, : logits.shape[1]]  # [masks, vocab]
    logits[places] = logits[places].masked_fill(forbidden, float("-inf"))
    return logits
