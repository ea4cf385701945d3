"""Verification of drafts in C++ (drafts.cpp)."""

import torch
from torch import Tensor

from quire.ops.cpu.build import kernel
from quire.ops.cpu.sampling import on_cpu
from quire.ops.reference import drafts as reference


@reference.count_kept.implementation("cpu", supports=on_cpu)
def count_kept(token_ids: Tensor, rows: Tensor, positions: Tensor, sampled: Tensor, place_start_loc: Tensor) -> Tensor:
    kept = torch.empty(len(place_start_loc) - 1, dtype=torch.int64)
    kernel("quire_count_kept", "plpppplp")(
        token_ids.data_ptr(),
        token_ids.stride(0),
        rows.data_ptr(),
        positions.data_ptr(),
        sampled.data_ptr(),
        place_start_loc.data_ptr(),
        len(kept),
        kept.data_ptr(),
    )
    return kept


@reference.accept_or_resample.implementation("cpu", supports=on_cpu)
def accept_or_resample(p: Tensor, q: Tensor, drafts: Tensor, seeds: Tensor, output_positions: Tensor) -> Tensor:
    p, q = (x.float() if x.stride(1) == 1 else x.float().contiguous() for x in (p, q))
    drafts, seeds, output_positions = (x.contiguous() for x in (drafts, seeds, output_positions))
    tokens = torch.empty(len(p), dtype=torch.int64)
    kernel("quire_accept_or_resample", "plplllpppllpi")(
        p.data_ptr(),
        p.stride(0),
        q.data_ptr(),
        q.stride(0),
        *p.shape,
        drafts.data_ptr(),
        seeds.data_ptr(),
        output_positions.data_ptr(),
        reference.ACCEPTANCE,
        reference.RESAMPLING,
        tokens.data_ptr(),
        torch.get_num_threads(),
    )
    return tokens
