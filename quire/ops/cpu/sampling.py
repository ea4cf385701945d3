"""Sampling in C++. sampling.cpp computes noise on the fly and never stores it. truncate.cpp finds the largest logits
without sorting all of them."""

import torch
from torch import Tensor

from quire.ops.cpu.build import CODES, kernel, library
from quire.ops.reference import sampling as reference
from quire.ops.registry import Target


def on_cpu(target: Target) -> bool:  # logits are float32, whatever the model's type
    return target.device.type == "cpu" and library() is not None


@reference.argmax.implementation("cpu", supports=on_cpu)
def argmax(logits: Tensor) -> Tensor:
    if logits.stride(1) != 1 or logits.dtype not in CODES:
        return reference.argmax.reference(logits)  # type: ignore[no-any-return]
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    kernel("quire_argmax", "iplllpi")(
        CODES[logits.dtype],
        logits.data_ptr(),
        logits.stride(0),
        rows,
        vocab,
        tokens.data_ptr(),
        torch.get_num_threads(),
    )
    return tokens


@reference.keep_top_k_top_p.implementation("cpu", supports=on_cpu)
def keep_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    top_k = None if top_k is None else top_k.contiguous()
    top_p = None if top_p is None else top_p.contiguous()
    kernel("quire_keep_top_k_top_p", "plllppi")(
        logits.data_ptr(),
        logits.stride(0),
        *logits.shape,
        None if top_k is None else top_k.data_ptr(),
        None if top_p is None else top_p.data_ptr(),
        torch.get_num_threads(),
    )
    return logits


@reference.sample_gumbel.implementation("cpu", supports=on_cpu)
def sample_gumbel(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor | None = None,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> Tensor:
    given = logits
    logits = reference.scale(logits, temperature, min_p)
    if top_k is not None or top_p is not None:
        logits = keep_top_k_top_p(logits.clone() if logits is given else logits, top_k, top_p)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    seeds = seeds.contiguous()
    positions = positions.contiguous()
    tokens = torch.empty(rows, dtype=torch.int64)
    kernel("quire_sample_gumbel", "plllpppi")(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        vocab,
        seeds.data_ptr(),
        positions.data_ptr(),
        tokens.data_ptr(),
        torch.get_num_threads(),
    )
    return tokens
