"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the cache stores one compressed vector per token.

A head's keys and values are linear maps of that latent vector, and are never computed. Instead, the key map is applied
to the queries, and the value map to the result ("absorbed"), so attention runs over the latent vectors.

  cached of a token [ latent, normed | rotary key ]       latent: kv_rank, rotary key: rope_dim, shared by all heads
  query of a head   [ q_nope W_UK    | rotary query ]
  result of a head  ( sum of p * latent ) W_UV

With an indexer, a query attends to the tokens that it selects (attention/sparse.py).
"""

from typing import cast

import torch
from torch import Tensor

from quire.attention.sparse import SelectingAttention
from quire.layers.attention import CachedAttention
from quire.layers.attention_spec import LatentAttentionSpec, LayerPlace
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState, pick
from quire.layers.indexer import Indexer
from quire.layers.linear import ColumnParallelLinear, LinearShape, ReplicatedLinear, RowParallelLinear, make_weight
from quire.layers.lora import AdapterSlots, LowRank, Matrices, Piece, slots_of_copies
from quire.layers.norm import make_norm
from quire.layers.pooling_indexer import PoolingIndexer
from quire.layers.specs import OutputPart


class LatentAttention(CachedAttention):
    """The attention of one layer. names: the names of q, or of q_a, q_a_norm and q_b; of kv_a, kv_a_norm, kv_b and o;
    of attention_gate and sinks; and those of the indexer."""

    def __init__(self, builder: Builder, spec: LatentAttentionSpec, names: dict[str, str], place: LayerPlace) -> None:
        self.spec = spec
        self.place = place
        kernels = builder.kernels
        self.kernels = kernels
        self.rotary_embedding = kernels.rotary_embedding
        self.linear_by_head = kernels.linear_by_head
        self.join = kernels.join
        self.sharpen = kernels.sharpen
        (heads, is_copy), hidden = spec.heads(builder.tensor_group), spec.hidden_size
        query_dim = spec.nope_dim + spec.rope_dim
        total = spec.num_heads
        self.num_heads = len(heads)

        def parts(name: str, dim: int) -> list[OutputPart]:
            return [OutputPart(names[name], total * dim, heads.start * dim, heads.stop * dim)]

        self.q_a = self.q_a_norm = None
        if spec.q_rank is None:
            self.q = ColumnParallelLinear(builder, hidden, parts("q", query_dim))
        else:
            self.q_a = ReplicatedLinear(builder, names["q_a"], hidden, spec.q_rank, spec.bias)
            self.q_a_norm = make_norm(builder, names["q_a_norm"], spec.q_rank, spec.q_norm or spec.norm)
            self.q = ColumnParallelLinear(builder, spec.q_rank, parts("q_b", query_dim))
        self.indexer: Indexer | PoolingIndexer | None = None
        if spec.indexer is not None and spec.selects:
            assert spec.q_rank is not None, "the indexer reads compressed queries"
            make = PoolingIndexer if spec.indexer.pool else Indexer
            self.indexer = make(builder, spec.indexer, names, hidden, spec.q_rank)
        self.kv_a = ReplicatedLinear(builder, names["kv_a"], hidden, spec.kv_rank + spec.rope_dim, spec.bias)
        self.kv_a_norm = make_norm(builder, names["kv_a_norm"], spec.kv_rank, spec.norm)
        self.rope_norm = None
        if spec.rope_norm is not None:
            self.rope_norm = make_norm(builder, names["k_rope_norm"], spec.rope_dim, spec.rope_norm)
        shape = LinearShape(tuple(parts("kv_b", spec.nope_dim + spec.value_dim)), spec.kv_rank, 0, spec.kv_rank)
        self.kv_b = make_weight(builder, shape)
        builder.when_loaded(self._absorb)
        self.adapters: list[LowRank] = []  # for to_latent and for from_latent
        if builder.adapters is not None and builder.adapters.change([shape]):
            self.adapters = [LowRankMap(builder, builder.adapters, shape, spec, keys) for keys in (True, False)]
        self.gate = None
        if spec.output_gate:
            width = 1 if spec.output_gate == "by_head" else spec.value_dim
            self.gate = ColumnParallelLinear(builder, hidden, parts("attention_gate", width))
        self.kernels = kernels
        self.sinks = None
        if spec.sinks:
            self.sinks = builder.parameter(len(heads), dtype=torch.float32)
            builder.part(names["sinks"], self.sinks, (total,), slice(heads.start, heads.stop))
        inner = (heads.start * spec.value_dim, heads.stop * spec.value_dim)
        self.out = RowParallelLinear(
            builder, names["o"], total * spec.value_dim, inner, hidden, spec.bias, is_copy=is_copy
        )

    def _absorb(self) -> None:
        spec = self.spec
        maps = self.kv_b.dense().view(self.num_heads, spec.nope_dim + spec.value_dim, spec.kv_rank)
        self.to_latent = maps[:, : spec.nope_dim].transpose(1, 2).contiguous()  # [heads, kv_rank, nope_dim]
        self.from_latent = maps[:, spec.nope_dim :].contiguous()  # [heads, value_dim, kv_rank]
        del self.kv_b

    def __call__(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] -> [tokens or len(wanted), hidden], this rank's summand. The latents of all tokens are
        stored."""
        assert self.backend is not None, "bind the cache first"
        assert self.cache is not None
        spec = self.spec
        tokens = x.shape[0]
        slots = state.slots
        wanted_slots = state.slots_of(wanted)
        plan = state.plans[self.place.kv_group]
        q = x if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x, slots))
        if self.indexer is not None:
            rotary = None if self.place.rotary is None else state.rotary[self.place.rotary]
            self.indexer.select(x, q, slots, rotary, cast(SelectingAttention, self.backend), plan)
        q = self.q(q, slots).view(tokens, self.num_heads, -1)
        compressed = self.kv_a(x, slots)
        latent = self.kv_a_norm(compressed[:, : spec.kv_rank])
        q_rope = q[..., spec.nope_dim :]
        k_rope = compressed[:, None, spec.kv_rank :]
        if self.rope_norm is not None:
            k_rope = self.rope_norm(k_rope)
        if self.place.rotary is not None:
            tables = state.rotary[self.place.rotary]
            q_rope, k_rope = self.rotary_embedding(q_rope, k_rope, *tables, spec.interleaved_rotary)
        q_nope = q[..., : spec.nope_dim]
        absorbed = self._adapted(0, q_nope, self.linear_by_head(q_nope, self.to_latent), slots)
        self.backend.store(self.cache, self.join(latent[:, None], k_rope), None, plan)
        q = self.join(absorbed, q_rope)
        if (rise := spec.temperature) is not None:
            q = self.sharpen(q, state.inputs.positions, rise.scale, rise.length, rise.offset)
        out, _ = self.backend.attend(
            q, self.cache, plan, scale=spec.scale, window=self.place.window, sinks=self.sinks
        )  # [tokens, heads, kv_rank]
        out = pick(out, wanted)
        values = self.linear_by_head(out, self.from_latent)  # [tokens, heads, value_dim]
        values = self._adapted(1, out, values, wanted_slots)
        values = values.reshape(len(out), self.num_heads * spec.value_dim)
        if self.gate is not None:
            values = self._gated(values, self.gate(pick(x, wanted), wanted_slots))
        return self.out(values, wanted_slots)

    def _gated(self, values: Tensor, gate: Tensor) -> Tensor:
        """values: [tokens, heads * value_dim]; gate: a number for each, or for each head"""
        kernels = self.kernels
        if gate.shape == values.shape:
            gated: Tensor = kernels.gated_norm(values, gate, None, 0.0, 1, False, "sigmoid")
            return gated
        factors = kernels.activate(gate, "sigmoid").view(-1, 1)
        by_head: Tensor = kernels.multiply(values.view(-1, self.spec.value_dim), factors)
        return by_head.view(values.shape)

    def _adapted(self, which: int, given: Tensor, out: Tensor, slots: Tensor | None) -> Tensor:
        """Return the result of a map with adapters. given: [tokens, heads, in]; out: [tokens, heads, outs]; slots: the
        slots of the tokens' adapters."""
        if slots is None or not self.adapters:
            return out
        heads = torch.arange(len(given) * self.num_heads, device=out.device)
        rows = slots_of_copies(slots, self.num_heads, heads // self.num_heads, heads % self.num_heads)
        return self.adapters[which].add(out.flatten(0, 1), given.flatten(0, 1), rows).view(out.shape)


class LowRankMap(LowRank):
    """The adapters of kv_b in one of the two maps into which it is absorbed. Each head has its own maps.

    For a head, B A of kv_b has the parts B_K A and B_V A. Its key map, which is applied to queries, becomes A^T B_K^T
    q, and its value map B_V A x.
    """

    def __init__(
        self, builder: Builder, slots: AdapterSlots, shape: LinearShape, spec: LatentAttentionSpec, of_keys: bool
    ) -> None:
        """shape: the shape of kv_b. of_keys: whether this is the key map or the value map."""
        self.spec = spec
        self.of_keys = of_keys
        super().__init__(builder, slots, [shape], on_demand=True)
        slots.products.pop()
        self.copies = shape.out_features // (spec.nope_dim + spec.value_dim)
        self.ins, outs = (spec.nope_dim, spec.kv_rank) if of_keys else (spec.kv_rank, spec.value_dim)
        self.ends = [0, outs]
        self._reserve(on_demand=False)

    def piece(self, matrices: Matrices) -> Piece | None:
        [part] = self.shapes[0].parts
        if part.name not in matrices:
            return None
        a, b = matrices[part.name]
        maps = b[part.start : part.stop].reshape(self.copies, -1, len(a))  # [heads, nope_dim + value_dim, rank]
        keys = maps[:, : self.spec.nope_dim]
        values = maps[:, self.spec.nope_dim :]
        piece = self._blank(len(a))
        (piece.b if self.of_keys else piece.a[:, 0]).copy_(a)
        (piece.a[:, 0] if self.of_keys else piece.b).copy_((keys if self.of_keys else values).transpose(1, 2))
        return piece
