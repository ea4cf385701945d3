"""Verification of drafts: decides which of a step's sampled tokens become part of the texts."""

import torch
from torch import Tensor

from quire.ops.reference.sampling import uniform_noise
from quire.ops.registry import ANYWHERE, declare, declare_invariant

# The noise streams of a seed. sample_gumbel draws the target's tokens with the seed itself. The key of each other
# stream is the exclusive or of the seed and one of these constants. They are words of SHA-512's initial state, so the
# streams of neighbouring seeds do not overlap.
ACCEPTANCE = 0x3C6EF372FE94F82B  # whether a draft is accepted
RESAMPLING = 0x1F83D9ABFB41BD6B  # the token that replaces a rejected draft
_DRAFTING = 0x510E527FADE682D1  # the draft


def draft_seeds(seeds: Tensor) -> Tensor:
    """Return the seeds with which sample_gumbel draws the drafts that `accept_or_resample` verifies with `seeds`:
    int64."""
    return seeds ^ _DRAFTING


@declare_invariant(*ANYWHERE)
def count_kept(token_ids: Tensor, rows: Tensor, positions: Tensor, sampled: Tensor, place_start_loc: Tensor) -> Tensor:
    """Return the number of sampled tokens of each request that are kept, [requests], int64: those equal to the draft at
    their place, up to and including the first one that differs. At its last place, a request has no draft.

    token_ids: [all rows, longest], int32, with the drafts after the known tokens; rows, positions, sampled: [places],
    int64, the draft of a place is at the next position; place_start_loc: [requests + 1], int64, request i has the
    places place_start_loc[i] up to place_start_loc[i + 1].
    """
    places = torch.arange(len(rows), device=rows.device)
    starts = place_start_loc[:-1]
    ends = place_start_loc[1:]
    request = torch.searchsorted(ends, places, right=True)
    is_accepted = (token_ids[rows, positions + 1] == sampled) & (places + 1 < ends[request])
    first_other = ends.scatter_reduce(0, request, torch.where(is_accepted, len(rows), places), "amin")
    return torch.where(starts < ends, first_other - starts + 1, 0)


@declare
def accept_or_resample(p: Tensor, q: Tensor, drafts: Tensor, seeds: Tensor, output_positions: Tensor) -> Tensor:
    """Return a token for each place, distributed as softmax(p): [places], int64. An accepted draft is returned itself.

    Drafts must have been drawn from softmax(q). A draft is accepted with the probability min(1, p / q), where p and q
    are its two probabilities. Otherwise the token is drawn from the normalized max(p - q, 0), in which the draft has
    the probability 0. Source: the rejection rule of Leviathan et al., arXiv:2211.17192, and Chen et al.,
    arXiv:2302.01318.

    p, q: [places, vocab], any float type, the logits of the target model and of the drafter, divided by the
    temperature, -inf where a token is excluded. drafts: [places], int64, -1 where there is none. seeds,
    output_positions: [places], int64, as for sample_gumbel. Without a draft, if the draft's probability in softmax(q)
    is 0, and if softmax(q) is NaN, the token is drawn from softmax(p).
    """
    p = p.softmax(-1, torch.float32)
    q = q.softmax(-1, torch.float32)
    index = drafts.clamp(min=0)[:, None]
    p_draft = p.gather(1, index)[:, 0]
    q_draft = q.gather(1, index)[:, 0]
    is_drawn = (drafts >= 0) & (q_draft > 0)
    residual = (p - torch.where(is_drawn[:, None], q, 0)).clamp(min=0)
    uniform = uniform_noise(seeds ^ ACCEPTANCE, output_positions, 1)[:, 0]
    # If p and q differ only by rounding, a rejected draft may leave nothing to draw from.
    is_accepted = is_drawn & ((uniform * q_draft < p_draft) | (residual == 0).all(-1))
    # The arg-max of log(residual) + Gumbel noise, without the logarithm, which does not change the order.
    noise = -uniform_noise(seeds ^ RESAMPLING, output_positions, p.shape[1]).log()
    return torch.where(is_accepted, drafts, (residual / noise).argmax(-1))
