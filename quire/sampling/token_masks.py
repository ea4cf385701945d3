"""Bit masks of the tokens that may be sampled; a grammar makes them."""

import numpy as np
import torch
from torch import Tensor

from quire.messages.step import TokenMasks
from quire.ops.memory import upload


def forbid_masked(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits [places, vocab] of tokens that the masks do not allow to minus infinity, in place."""
    words = np.frombuffer(masks.bits, np.int32).reshape(len(masks.places), -1).copy()
    places = upload(np.asarray(masks.places, np.int64), logits.device)
    bits = upload(words, logits.device)[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)
    forbidden = ((bits & 1) == 0).flatten(1)[:, : logits.shape[1]]  # [masked places, vocab]
    logits[places] = logits[places].masked_fill(forbidden, float("-inf"))
