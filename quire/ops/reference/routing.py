"""The assignment of tokens to experts."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quire.ops.registry import declare, declare_invariant


class Routing(NamedTuple):
    """The options of a router's choice, see MoESpec in layers/specs.py."""

    top_k: int
    scoring: Literal["softmax", "sigmoid", "sparse_mixer", "sqrt_softplus"] = "softmax"
    jitter: float = 0.0
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    topk_groups: int = 1
    group_score: Literal["best", "two_best"] = "best"


def scores_of(logits: Tensor, scoring: str) -> Tensor:
    """Return the scores of experts. logits: [tokens, experts], float32"""
    if scoring == "sqrt_softplus":
        return torch.nn.functional.softplus(logits).sqrt()
    return logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()


def weigh(logits: Tensor, experts: Tensor, routing: Routing) -> Tensor:
    """Return the weights of experts that were chosen in another way. logits: [tokens, all experts]; experts: [tokens,
    top_k], int64 -> [tokens, top_k], float32"""
    weights = scores_of(logits.float(), routing.scoring).gather(1, experts)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.scale


def _row_sums(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


@declare
def choose_experts(
    logits: Tensor, correction_bias: Tensor | None, routing: Routing, row_sums: Callable[[Tensor], Tensor] = _row_sums
) -> tuple[Tensor, Tensor]:
    """Return each token's experts and their weights, computed in float32, in the order of their scores.

    logits: [tokens, experts]; correction_bias: [experts], float32; row_sums: the function for sums of rows -> weights,
    float32, and experts, int64: [tokens, top_k]. Among equal scores, the choice is arbitrary.
    """
    logits = logits.float()
    if routing.scoring == "sparse_mixer":
        return _sparse_mixer(logits, routing.jitter)
    scores = scores_of(logits, routing.scoring)
    choice = scores if correction_bias is None else scores + correction_bias
    if routing.groups > 1:
        grouped = choice.view(len(logits), routing.groups, choice.shape[1] // routing.groups)
        best = grouped.topk(1 if routing.group_score == "best" else 2, dim=-1).values.sum(-1)
        excluded = torch.ones_like(best, dtype=torch.bool).scatter_(
            1, best.topk(routing.topk_groups, dim=-1).indices, False
        )
        choice = grouped.masked_fill(excluded[:, :, None], float("-inf")).flatten(1)
    experts = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if routing.normalize:
        weights = weights / (row_sums(weights) + 1e-20)
    return weights * routing.scale, experts


def _sparse_mixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Return the weights and ids of two experts by SparseMixer-v2 (arXiv:2409.12136): the best, and the best of the
    others. The weight of each is its share of the softmax over the experts with nearly the same score; the second
    choice excludes the first expert. logits: [tokens, experts]"""
    weights = []
    experts = []
    left = logits
    for _ in range(2):
        best, index = left.max(-1, keepdim=True)
        distance = (best - logits) / torch.maximum(logits.abs(), best)
        near = left.masked_fill(distance > 2 * jitter, float("-inf"))
        weights.append(near.softmax(-1).gather(1, index))
        experts.append(index)
        left = left.scatter(1, index, float("-inf"))
    return torch.cat(weights, 1), torch.cat(experts, 1)


@declare_invariant("cuda")
def sort_by_expert(x: Tensor, experts: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token for each of its experts, sorted by expert, then by token.

    x: [tokens, dim]; experts: [tokens, top_k], int64; bounds: 0, 1, ... number of experts, int64 -> rows: [tokens *
    top_k, dim]; offsets: [number of experts + 1], int64: expert e has the rows offsets[e] : offsets[e + 1], and rows of
    higher expert numbers follow; order: [tokens * top_k], int64: token * top_k + choice of each row.
    """
    sorted_experts, order = experts.flatten().sort(stable=True)
    return x[order // experts.shape[1]], torch.searchsorted(sorted_experts, bounds), order
