"""Attention to compressed entries (DeepSeek-V4), each of which stands for `rate` tokens of the text.

An entry is a latent. It is stored in the block of the last of its tokens, so the blocks of a group hold fewer entries
than tokens. As in sparse attention (attention/sparse.py), the inner backend receives every token as a request with one
query, whose block table lists the slots of its entries: all complete ones, or those that an indexer selects.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape, CacheBackend, Scores, StepLayout
from quire.attention.rows import Rows, StepTokens
from quire.kv.specs import EntriesShape

_LEAST_SLOTS = 16  # per block: backends need a multiple


@dataclass
class EntriesPlan:
    """complete: [tokens], the number of entries whose tokens a token has all seen. table: [tokens, most], int32, the
    slots of the entries to which it attends; the first min(complete, most) count. ends: the tokens that complete an
    entry, and `ending` the slots of these entries."""

    tokens: StepTokens
    complete: Tensor
    table: Tensor
    ends: Tensor
    ending: Tensor
    inner: Any


class CompressedEntries(AttentionBackend):
    """The entries (role "entries"), and the keys by which an indexer selects them (role "entry_keys")."""

    def __init__(
        self, shape: AttentionShape, entries: EntriesShape, choose: Callable[[AttentionShape], AttentionBackend]
    ) -> None:
        super().__init__(shape)
        self.rate = rate = entries.rate
        self.top_k = entries.top_k
        rows = -(-shape.block_size // rate)
        self.per_block = -(-rows // _LEAST_SLOTS) * _LEAST_SLOTS
        self.latents = choose(replace(shape, by_slot=True, block_size=self.per_block))
        self.keys = Rows(entries.key_dim, shape.dtype, shape.block_size, rate)
        self.name = self.latents.name
        self.cache_dtype = self.latents.cache_dtype
        self.block_shape = self.latents.block_shape

    @classmethod
    def unsupported(cls, shape: AttentionShape) -> str | None:
        return None

    def of_role(self, role: str) -> CacheBackend:  # type: ignore[override]
        return self.keys if role == "entry_keys" else self

    def plan(self, layout: StepLayout, previous: EntriesPlan | None = None) -> EntriesPlan:
        tokens = StepTokens.of(layout)
        table = layout.block_table
        complete = tokens.seen // self.rate
        most = max(1, table.shape[1] * self.shape.block_size // self.rate)
        if self.top_k is None:
            slots = self._slots(table, torch.arange(most, device=table.device).expand(len(table), -1))[tokens.rows]
        else:
            slots = torch.zeros(len(tokens.rows), min(self.top_k, most), dtype=torch.int32, device=table.device)
        ends = ((tokens.seen % self.rate == 0) & (tokens.slots >= 0)).nonzero()[:, 0]
        ending = self._slots(table[tokens.rows[ends]], complete[ends, None] - 1)[:, 0].long()
        one = torch.arange(len(tokens.rows) + 1, dtype=torch.int32, device=table.device)
        own = torch.full_like(tokens.slots, -1).index_copy_(0, ends, ending)
        lengths = complete.clamp(1, slots.shape[1]).int()
        inner = self.latents.plan(StepLayout(one, lengths, own, slots, tokens_per_request=1))
        return EntriesPlan(tokens, complete, slots, ends, ending, inner)

    def _slots(self, table: Tensor, entries: Tensor) -> Tensor:
        """Return the slots of entries, by number. table: [any, blocks]; entries: [any, n] -> [any, n], int32"""
        last = (entries + 1) * self.rate - 1
        blocks = table.gather(1, (last // self.shape.block_size).clamp(max=table.shape[1] - 1).long())
        return (blocks * self.per_block + last % self.shape.block_size // self.rate).int()

    def store(self, cache: Tensor, k: Tensor, v: Tensor | None, plan: EntriesPlan) -> None:
        """k: the entries that tokens complete, [len(plan.ends), dim]"""
        every = k.new_zeros(len(plan.complete), 1, k.shape[1])
        every[plan.ends, 0] = k
        self.latents.store(cache, every, None, plan.inner)

    def store_keys(self, cache: Tensor, keys: Tensor, plan: EntriesPlan) -> None:
        """keys: [len(plan.ends), key_dim]"""
        positions = plan.tokens.seen[plan.ends, None] - 1
        tables = plan.tokens.layout.block_table[plan.tokens.rows[plan.ends]]
        self.keys.store(cache, keys, self.keys.slots_of(tables, positions)[:, 0])

    def select_entries(self, cache: Tensor, q: Tensor, weights: Tensor, plan: EntriesPlan) -> None:
        """Fill plan.table by the scores of keys, sum over heads of weight * max(0, q . key), among complete entries.
        Ties are resolved in favour of earlier entries.

        cache: of keys; q: [tokens, heads, key_dim]; weights: [tokens, heads]"""
        layout = plan.tokens.layout
        starts = layout.query_start_loc.tolist()
        most = plan.table.shape[1]
        for r, length in enumerate(layout.seq_lens.tolist()):
            here = slice(starts[r], starts[r + 1])
            count = length // self.rate
            if not count or starts[r] == starts[r + 1]:
                continue
            table = layout.block_table[r : r + 1]
            entries = torch.arange(count, device=table.device)
            places = self.keys.slots_of(table, (entries[None] + 1) * self.rate - 1)[0]
            keys = self.keys.read(cache, places).float()
            scores = torch.einsum("th,the->te", weights[here].float(), (q[here].float() @ keys.T).relu())
            hidden = entries >= plan.complete[here, None]
            order = scores.masked_fill(hidden, float("-inf")).argsort(descending=True, stable=True)
            best = order[:, : min(most, count)]
            best = best.masked_fill(best >= plan.complete[here, None], count).sort(-1).values
            slots = self._slots(table, best.clamp(max=count - 1).flatten()[None])
            plan.table[here, : best.shape[1]] = slots.view(best.shape)

    def attend(self, q: Tensor, cache: Tensor, plan: EntriesPlan, **scores: Unpack[Scores]) -> tuple[Tensor, Tensor]:
        """See AttentionBackend.attend. The lse of tokens without a complete entry is -inf, and their result arbitrary
        but finite."""
        out, lse = self.latents.attend(q, cache, plan.inner, **scores)
        is_without = plan.complete < 1
        return out.masked_fill(is_without[:, None, None], 0.0), lse.masked_fill(is_without[:, None], float("-inf"))
