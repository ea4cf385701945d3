"""Compressed attention (DeepSeek-V4): to the last tokens, and to entries of which each stands for `rate` tokens.

A token has one vector for all heads, which is key and value. So the results of attention are rotated, too, and are
rotated back. An entry is a weighted sum of vectors of its tokens, with weights from a softmax over the tokens for each
element. With an indexer (layers/indexer.py), whose keys are such entries as well, a token attends to some entries only,
and an entry overlaps with the one before: it also has a second vector of each of that entry's tokens.

  cached of a token   [ vector ]            while it is in the window
                      [ inputs ]            until the entries that are made of it are complete
  cached of an entry  [ vector | index key ]
"""

from typing import Any

import torch
from torch import Tensor

from quire.attention.base import CacheBackend
from quire.attention.compressed import CompressedEntries, EntriesPlan
from quire.attention.rows import Rows, StepTokens
from quire.layers.attention import CachedAttention
from quire.layers.attention_spec import LayerPlace
from quire.layers.build import Builder
from quire.layers.compressed_spec import CompressedAttentionSpec, CompressedEntriesSpec
from quire.layers.forward_state import ForwardState, pick
from quire.layers.linear import ColumnParallelLinear, LinearShape, ReplicatedLinear, RowParallelLinear, make_weight
from quire.layers.norm import make_norm
from quire.layers.rotary import inverse_frequencies
from quire.layers.specs import NormSpec, OutputPart


class CompressedAttention(CachedAttention):
    """The attention of one layer. names: the names of q_a, q_a_norm, q_b, kv_a, kv_a_norm, o_a, o, sinks; and of the
    compressors: compress_kv, compress_gate, compress_positions and compress_norm, with the prefix "index_" for the
    indexer's, index_q and index_weights."""

    def __init__(
        self, builder: Builder, spec: CompressedAttentionSpec, names: dict[str, str], place: LayerPlace
    ) -> None:
        self.spec = spec
        self.place = place
        self.kernels = builder.kernels
        heads, is_copy = spec.heads(builder.tensor_group)
        hidden = spec.hidden_size
        total = spec.num_heads
        dim = spec.head_dim
        self.num_heads = len(heads)
        self.scale = dim**-0.5
        self.q_a = ReplicatedLinear(builder, names["q_a"], hidden, spec.q_rank)
        self.q_a_norm = make_norm(builder, names["q_a_norm"], spec.q_rank, spec.norm)
        part = OutputPart(names["q_b"], total * dim, heads.start * dim, heads.stop * dim)
        self.q_b = ColumnParallelLinear(builder, spec.q_rank, [part])
        self.q_norm = make_norm(builder, "", dim, NormSpec("rms", spec.norm.eps, affine=False))
        self.kv = ReplicatedLinear(builder, names["kv_a"], hidden, dim)
        self.kv_norm = make_norm(builder, names["kv_a_norm"], dim, spec.norm)
        self.sinks = builder.parameter(len(heads), dtype=torch.float32)
        builder.part(names["sinks"], self.sinks, (total,), slice(heads.start, heads.stop))
        self.out = GroupedOutput(builder, spec, names, heads, is_copy)
        self.entries: Entries | None = None
        if spec.entries is not None:
            self.entries = Entries(builder, spec, spec.entries, names)

    def of_role(self, role: str) -> Any:
        assert self.entries is not None
        return self.entries.caches[role]

    def __call__(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or len(wanted), hidden], this rank's summand. The vectors of all tokens are
        stored."""
        assert self.backend is not None, "bind the cache first"
        assert self.cache is not None
        assert self.place.rotary is not None
        slots = state.slots
        cos, sin = state.rotary[self.place.rotary]
        latent = self.q_a_norm(self.q_a(x, slots))
        q = self.q_norm(self.q_b(latent, slots).view(len(x), self.num_heads, -1))
        kv = self.kv_norm(self.kv(x, slots))[:, None]
        q, kv = self._rotated(q, kv, cos, sin)
        plan = state.plans[self.place.kv_group]
        self.backend.store(self.cache, kv, None, plan)
        out, lse = self.backend.attend(
            q, self.cache, plan, scale=self.scale, window=self.place.window, sinks=self.sinks
        )
        if self.entries is not None:
            plans = state.plans[self.place.entries_group], state.plans[self.place.inputs_group]
            far, far_lse = self.entries.attend(x, latent, q, (cos, sin), slots, plans, self.scale)
            out, _ = self.kernels.merge_partials(torch.stack((out, far)), torch.stack((lse, far_lse)))
        out, _ = self._rotated(out, kv, cos, -sin)
        return self.out(pick(out, wanted), state.slots_of(wanted))

    def _rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k, [tokens, heads, head_dim], with their last elements rotated."""
        rest = self.spec.head_dim - self.spec.rope_dim
        turned = self.kernels.rotary_embedding(q[..., rest:], k[..., rest:], cos, sin, True)
        q, k = (self.kernels.join(x[..., :rest], end) for x, end in zip((q, k), turned, strict=True))
        return q, k


class GroupedOutput:
    """The output projection as two products. The first is computed separately for each group of heads."""

    def __init__(
        self, builder: Builder, spec: CompressedAttentionSpec, names: dict[str, str], heads: range, is_copy: bool
    ) -> None:
        size = spec.num_heads // spec.output_groups
        rank = spec.output_rank
        dim = spec.head_dim
        groups = range(heads.start // size, (heads.stop - 1) // size + 1)
        self.shares = []  # this rank's heads of each group
        self.weights = []
        for group in groups:
            own = range(max(heads.start, group * size), min(heads.stop, (group + 1) * size))
            part = OutputPart(names["o_a"], spec.output_groups * rank, group * rank, (group + 1) * rank)
            columns = ((own.start - group * size) * dim, (own.stop - group * size) * dim)
            self.weights.append(make_weight(builder, LinearShape((part,), size * dim, *columns)))
            self.shares.append(slice(own.start - heads.start, own.stop - heads.start))
        inner = (groups.start * rank, groups.stop * rank)
        self.out = RowParallelLinear(
            builder, names["o"], spec.output_groups * rank, inner, spec.hidden_size, is_copy=is_copy
        )

    def __call__(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """x: [tokens, heads, head_dim] -> [tokens, hidden], this rank's summand"""
        parts = zip(self.shares, self.weights, strict=True)
        return self.out(torch.cat([weight(x[:, own].flatten(1), None) for own, weight in parts], 1), slots)


class Bound:
    """A backend and a layer's part of its cache."""

    backend: CacheBackend
    cache: Tensor

    def bind(self, backend: CacheBackend, cache: Tensor) -> None:
        self.backend = backend
        self.cache = cache


class Entries:
    """The compressed entries of a layer."""

    def __init__(
        self, builder: Builder, spec: CompressedAttentionSpec, entries: CompressedEntriesSpec, names: dict[str, str]
    ) -> None:
        self.spec = entries
        self.rope_dim = spec.rope_dim
        self.kernels = builder.kernels
        self.caches = {role: Bound() for role in ("entries", "entry_keys", "inputs")}
        self.compressors = [Compressor(builder, spec, entries, spec.head_dim, names, "")]
        if (index := entries.indexer) is not None:
            self.compressors.append(Compressor(builder, spec, entries, index.head_dim, names, "index_"))
            self.q = ReplicatedLinear(builder, names["index_q"], spec.q_rank, index.num_heads * index.head_dim)
            self.weights = ReplicatedLinear(builder, names["index_weights"], spec.hidden_size, index.num_heads)

    def attend(
        self,
        x: Tensor,
        latent: Tensor,
        q: Tensor,
        rotary: tuple[Tensor, Tensor],
        slots: Tensor | None,
        plans: tuple[EntriesPlan, StepTokens],
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Complete entries, and attend to them. x: [tokens, hidden]; latent: the compressed queries; q: [tokens, heads,
        head_dim] -> results and their lse, see AttentionBackend.attend"""
        plan, tokens = plans
        cache = self.caches["entries"].cache
        backend = self.caches["entries"].backend
        assert isinstance(backend, CompressedEntries)
        made = self._complete(x, slots, plan, tokens)
        backend.store(cache, made[0], None, plan)
        if self.spec.indexer is not None:
            backend.store_keys(self.caches["entry_keys"].cache, made[1], plan)
            queries = self.q(latent, slots).view(len(x), self.spec.indexer.num_heads, -1)
            rest = queries.shape[2] - self.rope_dim
            end = queries[..., rest:]
            turned, _ = self.kernels.rotary_embedding(
                end, end[:, :1].clone(), *rotary, True
            )  # which may overwrite both
            queries = self.kernels.join(queries[..., :rest], turned)
            weights = self.weights(x, slots)
            backend.select_entries(self.caches["entry_keys"].cache, queries, weights, plan)
        return backend.attend(q, cache, plan, scale=scale)

    def _complete(self, x: Tensor, slots: Tensor | None, plan: EntriesPlan, tokens: StepTokens) -> list[Tensor]:
        """Return what each compressor makes of the entries that the step completes: [entries, dim] each."""
        rows = self.caches["inputs"].backend
        cache = self.caches["inputs"].cache
        assert isinstance(rows, Rows)
        given = torch.cat([compressor.inputs(x, slots) for compressor in self.compressors], 1)
        real = tokens.slots >= 0
        rows.store(cache, given[real], tokens.slots[real])
        ends = plan.ends
        back = torch.arange(-self.spec.span, 0, device=x.device)
        positions = tokens.seen[ends, None] + back  # [entries, span]
        table = tokens.layout.block_table[tokens.rows[ends]]
        read = rows.read(cache, rows.slots_of(table, positions))
        parts = torch.split(read, [compressor.width for compressor in self.compressors], -1)
        first = tokens.seen[ends] - self.spec.rate
        return [
            compressor.combine(part, positions, first) for compressor, part in zip(self.compressors, parts, strict=True)
        ]


class Compressor:
    """Makes entries of `dim` elements. names: see CompressedAttention."""

    def __init__(
        self,
        builder: Builder,
        spec: CompressedAttentionSpec,
        entries: CompressedEntriesSpec,
        dim: int,
        names: dict[str, str],
        prefix: str,
    ) -> None:
        series = 1 + entries.overlaps
        self.dim = dim
        self.rate = entries.rate
        self.overlaps = entries.overlaps
        self.width = 2 * series * dim
        self.rope_dim = spec.rope_dim
        self.kernels = builder.kernels
        self.kv = ReplicatedLinear(builder, names[f"{prefix}compress_kv"], spec.hidden_size, series * dim)
        self.gate = ReplicatedLinear(builder, names[f"{prefix}compress_gate"], spec.hidden_size, series * dim)
        name = names[f"{prefix}compress_positions"]
        self.positions = builder.whole(name, entries.rate, series * dim, dtype=torch.float32)
        self.norm = make_norm(builder, names[f"{prefix}compress_norm"], dim, spec.norm)
        frequencies, self.factor = inverse_frequencies(spec.rotary, spec.rotary.max_positions)
        self.frequencies = frequencies.to(builder.device)

    def inputs(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """x: [tokens, hidden] -> vectors and gates, [tokens, width]"""
        return torch.cat((self.kv(x, slots), self.gate(x, slots)), 1)

    def combine(self, inputs: Tensor, positions: Tensor, first: Tensor) -> Tensor:
        """inputs: [entries, span, width]; positions: of the tokens, [entries, span], negative before the text; first:
        the positions of the entries' first tokens -> [entries, dim]"""
        kv, gate = inputs.float().chunk(2, -1)
        gate = gate + self.positions.repeat(positions.shape[1] // self.rate, 1)
        if self.overlaps:  # the first half of the span has the first series, the other half the second
            kv, gate = (
                torch.cat((x[:, : self.rate, : self.dim], x[:, self.rate :, self.dim :]), 1) for x in (kv, gate)
            )
        gate = gate.masked_fill(positions[..., None] < 0, float("-inf"))
        kv = kv.masked_fill(positions[..., None] < 0, 0.0)
        made = self.norm((kv * gate.softmax(1)).sum(1).to(inputs.dtype))[:, None]
        angles = first[:, None].float() * self.frequencies
        tables = angles.cos() * self.factor, angles.sin() * self.factor
        rest = self.dim - self.rope_dim
        turned, _ = self.kernels.rotary_embedding(made[..., rest:], made[..., rest:].clone(), *tables, True)
        rotated: Tensor = self.kernels.join(made[..., :rest], turned)
        return rotated[:, 0]
