"""Sparse attention whose indexer scores pools of consecutive tokens, not single tokens (GLM-5-Next)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape, CacheBackend, Selection, StepLayout
from quire.attention.rows import Rows, StepTokens
from quire.attention.sparse import SparseAttention, SparsePlan


@dataclass
class PooledPlan(SparsePlan):
    """tokens: of the step."""

    tokens: StepTokens


class PooledSparseAttention(SparseAttention):
    """A token selects the best complete pools, and also attends to the tokens of the incomplete one. The indexer stores
    a row for each token (role "indexer"), from which it makes the keys of pools."""

    keys: Rows  # type: ignore[assignment]

    def __init__(
        self,
        shape: AttentionShape,
        top_k: int,
        pool: int,
        row_size: int,
        choose: Callable[[AttentionShape], AttentionBackend],
    ) -> None:
        """top_k: the number of tokens in the pools that a token selects. pool: the tokens of a pool."""
        super().__init__(shape, top_k + pool - 1, shape.head_dim, choose)
        self.capturable = False  # the selection depends on the lengths of texts
        self.pool = pool
        self.top_pools = top_k // pool
        self.keys = Rows(row_size, shape.dtype, shape.block_size)

    def of_role(self, role: str) -> CacheBackend:  # type: ignore[override]
        return self.keys if role == "indexer" else self

    def plan(self, layout: StepLayout, previous: SparsePlan | None = None) -> PooledPlan:
        tokens = StepTokens.of(layout)
        count = len(tokens.slots)
        device = tokens.slots.device
        slots = torch.zeros(count, self.most, dtype=torch.int32, device=device)
        selection = Selection(tokens.rows, tokens.seen, layout.block_table, slots)
        selected = (tokens.seen // self.pool).clamp(max=self.top_pools) * self.pool + tokens.seen % self.pool
        one = torch.arange(count + 1, dtype=torch.int32, device=device)
        inner = StepLayout(one, selected.int(), layout.slot_mapping, slots, tokens_per_request=1)
        return PooledPlan(self.latents.plan(inner), selection, tokens)

    def select_pools(
        self,
        cache: Tensor,
        rows: Tensor,
        q: Tensor,
        weights: Tensor,
        to_keys: Callable[[Tensor], Tensor],
        plan: PooledPlan,
    ) -> None:
        """Store the tokens' rows, [tokens, row_size], then select pools by their scores, sum over heads of weight *
        max(0, q . key). Ties are resolved in favour of earlier pools.

        cache: of rows; q: [tokens, heads, dim]; weights: [tokens, heads]; to_keys: makes keys of pools, [pools, pool,
        row_size] -> [pools, dim]
        """
        tokens = plan.tokens
        real = tokens.slots >= 0
        self.keys.store(cache, rows[real], tokens.slots[real])
        starts = tokens.layout.query_start_loc.tolist()
        for r, length in enumerate(tokens.layout.seq_lens.tolist()):
            if starts[r] < starts[r + 1]:
                here = slice(starts[r], starts[r + 1])
                self._select(cache, length, r, here, (q[here].float(), weights[here].float()), to_keys, plan)

    def _select(
        self,
        cache: Tensor,
        length: int,
        row: int,
        here: slice,
        queries: tuple[Tensor, Tensor],
        to_keys: Callable[[Tensor], Tensor],
        plan: PooledPlan,
    ) -> None:
        """Select for the tokens `here` of one request of `length` tokens."""
        pools = length // self.pool
        table = plan.tokens.layout.block_table[row : row + 1]
        every = self.keys.slots_of(table, torch.arange(length, device=table.device)[None])[0]  # slots of the text
        complete = plan.tokens.seen[here, None].long() // self.pool  # [tokens, 1]
        q, weights = queries
        read = self.keys.read(cache, every[: pools * self.pool].view(pools, self.pool))
        scores = torch.einsum("th,thp->tp", weights, (q @ to_keys(read).T).relu())
        number = torch.arange(pools, device=table.device)
        order = scores.masked_fill(number >= complete, float("-inf")).argsort(descending=True, stable=True)
        best = order[:, : self.top_pools]
        best = best.masked_fill(best >= complete, pools).sort(-1).values  # pools that are not complete come last
        chosen = (best[..., None] * self.pool + torch.arange(self.pool, device=table.device)).flatten(1)
        tail = complete * self.pool + torch.arange(self.pool - 1, device=table.device)
        out = plan.selection.slots[here]
        out[:, : chosen.shape[1]] = every[chosen.clamp(max=length - 1)].int()
        first = complete.clamp(max=self.top_pools) * self.pool  # the tail follows the selected pools
        out.scatter_(
            1, first + torch.arange(self.pool - 1, device=table.device), every[tail.clamp(max=length - 1)].int()
        )
