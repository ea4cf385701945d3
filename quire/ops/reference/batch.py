"""Builds the flat batch of a step from the state of the running requests, and appends the sampled tokens to that state.
Both run on the device that holds the state."""

import torch
from torch import Tensor

from quire.ops.registry import ANYWHERE, declare_invariant


@declare_invariant(*ANYWHERE)
def flat_batch(
    token_ids: Tensor,
    num_computed: Tensor,
    block_tables: Tensor,
    rows: Tensor,
    query_start_loc: Tensor,
    block_size: int,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
) -> None:
    """Fill the last four tensors. Row rows[i] contributes its next query_start_loc[i + 1] - query_start_loc[i] tokens.

    token_ids: [all rows, longest], int32; num_computed: [all rows], int64, tokens of earlier steps; block_tables:
    [groups, all rows, blocks], int32; rows: [requests], int64; query_start_loc: [requests + 1], int32; input_ids,
    positions: [tokens], int64; slot_mapping: [groups, tokens], int64; seq_lens: [requests], int32, computed and new
    tokens. Padded tokens, those past query_start_loc[-1], become token 0 at position 0 with slot -1. A padded request
    has no tokens and length 0.
    """
    tokens = torch.arange(len(input_ids), device=rows.device, dtype=torch.int32)
    request = torch.searchsorted(query_start_loc[1:], tokens, right=True)
    padded = request == len(rows)
    request = request.clamp_(max=len(rows) - 1)
    row = rows[request]
    position = (num_computed[row] + tokens - query_start_loc[request]).masked_fill_(padded, 0)
    positions.copy_(position)
    input_ids.copy_(token_ids[row, position]).masked_fill_(padded, 0)
    block = block_tables[:, row, position // block_size]
    slot_mapping.copy_(block * block_size + position % block_size).masked_fill_(padded, -1)
    counts = query_start_loc.diff()
    seq_lens.copy_((num_computed[rows] + counts).masked_fill_(counts == 0, 0))


@declare_invariant(*ANYWHERE)
def append_tokens(token_ids: Tensor, num_tokens: Tensor, rows: Tensor, positions: Tensor, sampled: Tensor) -> None:
    """Append sampled tokens: sampled[i] comes after position positions[i] of row rows[i].

    token_ids: [all rows, longest], int32; num_tokens: [all rows], int64, raised to include the token of the last place;
    rows, positions, sampled: [places], int64. The places of a row are in the order of its tokens.
    """
    token_ids[rows, positions + 1] = sampled.int()
    num_tokens.scatter_reduce_(0, rows, positions + 2, "amax")
