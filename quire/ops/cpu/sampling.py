"""Gumbel-max sampling in C++: sampling.cpp makes the noise where it is used, a vocabulary of it is never written."""

import torch
from torch import Tensor

from quire.ops.cpu.build import kernel, library
from quire.ops.reference import sampling as reference
from quire.ops.registry import Target


def _on_cpu(target: Target) -> bool:  # logits are float32, whatever the model's type
    return target.device.type == "cpu" and library() is not None


@reference.sample_gumbel.implementation("cpu", supports=_on_cpu)
def sample_gumbel(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    seeds, positions = seeds.contiguous(), positions.contiguous()
    tokens = torch.empty(rows, dtype=torch.int64)
    kernel("quire_sample_gumbel", "plllpppi")(
        logits.data_ptr(), logits.stride(0), rows, vocab, seeds.data_ptr(), positions.data_ptr(), tokens.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return tokens
