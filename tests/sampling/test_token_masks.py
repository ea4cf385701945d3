"""Bit masks keep tokens from being drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.messages.step import TokenMasks
from quire.sampling.token_masks import forbid_masked


def pack_mask(allowed: np.ndarray) -> bytes:
    """allowed: bool [places, vocab] -> the bits of TokenMasks"""
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").tobytes()


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 45, 320])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_places_keep_the_logits_of_allowed_tokens_alone(vocab_size, dtype):
    draw = np.random.default_rng(vocab_size)
    logits = torch.randn(5, vocab_size).to(dtype)
    allowed = draw.random((3, vocab_size)) < 0.3
    before, places = logits.clone(), [4, 0, 2]
    forbid_masked(logits, TokenMasks(places, pack_mask(allowed)))
    for place in (1, 3):
        assert torch.equal(logits[place], before[place])
    for place, kept in zip(places, torch.from_numpy(allowed), strict=True):
        assert torch.equal(logits[place][kept], before[place][kept])
        assert (logits[place][~kept] == float("-inf")).all()
