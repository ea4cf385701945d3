"""Masks of the tokens that may be sampled, with one program for each mask and 4,096 tokens."""

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference.masks import apply_token_masks
from quire.ops.triton.targets import on_gpu

_WORDS = 128  # words of 32 tokens that a program expands


@triton.jit(do_not_specialize_on_alignment=["places"])
def _apply_token_masks(logits, places, bits, row_stride, vocab, words_stride, WORDS: tl.constexpr):
    mask = tl.program_id(0)
    row = tl.load(places + mask)
    word_index = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    lanes = tl.arange(0, 32)
    words = tl.load(bits + mask.to(tl.int64) * words_stride + word_index, mask=word_index < words_stride, other=0)
    token = word_index[:, None] * 32 + lanes[None, :]
    cells = logits + row * row_stride + token
    inside = token < vocab
    allowed = ((words[:, None] >> lanes[None, :]) & 1) == 1
    values = tl.load(cells, mask=inside, other=0.0)
    tl.store(cells, tl.where(allowed, values, float("-inf")), mask=inside)


@apply_token_masks.implementation("triton", supports=on_gpu)
def apply_token_masks_triton(logits: Tensor, places: Tensor, bits: Tensor) -> Tensor:
    if logits.stride(1) != 1:
        return apply_token_masks.reference(logits, places, bits)  # type: ignore[no-any-return]
    masks, words = bits.shape
    if masks:
        _apply_token_masks[(masks, triton.cdiv(words, _WORDS))](
            logits, places, bits, logits.stride(0), logits.shape[1], words, _WORDS, num_warps=4, enable_fp_fusion=False
        )
    return logits
