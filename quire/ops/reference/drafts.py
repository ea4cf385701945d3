"""Verification of drafts: which of the tokens that were sampled at the places of a step become part of the texts."""

import torch
from torch import Tensor

from quire.ops.registry import ANYWHERE, declare_invariant


@declare_invariant(*ANYWHERE)
def count_kept(token_ids: Tensor, rows: Tensor, positions: Tensor, sampled: Tensor, place_start_loc: Tensor) -> Tensor:
    """How many of the sampled tokens of each request are kept, [requests], int64: those equal to the draft at their
    place, up to the first one that differs, and that one, too. At its last place, a request has no draft.

    token_ids: [all rows, longest], int32, with the drafts behind the known tokens; rows, positions, sampled: [places],
    int64, the draft of a place is at the position after it; place_start_loc: [requests + 1], int64, request i has the
    places place_start_loc[i] up to place_start_loc[i + 1].
    """
    places = torch.arange(len(rows), device=rows.device)
    starts, ends = place_start_loc[:-1], place_start_loc[1:]
    request = torch.searchsorted(ends, places, right=True)
    is_accepted = (token_ids[rows, positions + 1] == sampled) & (places + 1 < ends[request])
    first_other = ends.scatter_reduce(0, request, torch.where(is_accepted, len(rows), places), "amin")
    return torch.where(starts < ends, first_other - starts + 1, 0)
