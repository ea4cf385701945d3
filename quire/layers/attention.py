"""The attention layer: projections, norms and rotation around a paged attention backend."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, Preparation, PreparingBackend
from quire.layers.alibi import AlibiSlopes
from quire.layers.attention_spec import AttentionSpec, HeadShare, LayerPlace
from quire.layers.build import Builder
from quire.layers.distance_bias import distance_bias, root_bias
from quire.layers.forward_state import ForwardState, pick
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear, Rows
from quire.layers.norm import RMSNorm, make_norm
from quire.layers.qk_norm import QKNorm, make_qk_norm
from quire.layers.specs import NormSpec, OutputPart


class CachedAttention:
    """The base of all kinds of attention: a layer's backend and its part of the cache."""

    backend: AttentionBackend | None = None  # set together with the cache, once its size is known
    cache: Tensor | None = None

    def bind(self, backend: AttentionBackend, cache: Tensor) -> None:
        self.backend = backend
        self.cache = cache


class LowRankQueries:
    """The second half of the product that computes queries: a norm, then a projection. names: of q_a_norm and q_b."""

    def __init__(self, builder: Builder, spec: AttentionSpec, names: dict[str, str], heads: range) -> None:
        dim = spec.head_dim
        self.rank = spec.query_rank
        norm = None if spec.query_norm is None else names["q_a_norm"]
        self.norm = make_norm(builder, norm, self.rank, spec.query_norm or NormSpec("rms", 0.0))
        part = OutputPart(names["q_b"], spec.num_heads * dim, heads.start * dim, heads.stop * dim)
        self.project = ColumnParallelLinear(builder, self.rank, [part])

    def __call__(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """x: [tokens, rank] -> [tokens, heads * head_dim]"""
        return self.project(self.norm(x), slots)


class BlendGate(CachedAttention):
    """Blends a layer's result with that of attention to the keys and values of another layer. name: of a weight for
    each head."""

    def __init__(self, builder: Builder, name: str, spec: AttentionSpec, heads: range) -> None:
        own = slice(heads.start, heads.stop)
        self.weight = builder.parameter(len(heads), spec.head_dim)
        builder.part(f"{name}.weight", self.weight, (spec.num_heads, spec.head_dim), own)
        self.bias = builder.parameter(len(heads))
        builder.part(f"{name}.bias", self.bias, (spec.num_heads,), own)

    def __call__(self, q: Tensor, out: Tensor, plan: Any, scale: float) -> Tensor:
        """q: the queries, out: the layer's own result, [tokens, heads, head_dim] -> [tokens, heads, head_dim]"""
        assert self.backend is not None, "bind the cache first"
        assert self.cache is not None
        other, _ = self.backend.attend(q, self.cache, plan, scale=scale, window=None)
        share = torch.sigmoid((q * self.weight).sum(-1) + self.bias)[..., None]
        return other * share + out * (1 - share)


class Attention(CachedAttention):
    """The attention of one layer. names: the names of its tensors in the checkpoint, by role."""

    def __init__(self, builder: Builder, spec: AttentionSpec, names: dict[str, str], place: LayerPlace) -> None:
        share = HeadShare.of(spec, builder.tensor_group)
        dim = spec.head_dim
        self.num_heads = len(share.heads)
        self.has_cache = spec.source is None
        self.num_kv_heads = len(share.kv_heads) if self.has_cache else 0  # of the keys that the layer computes
        self.head_dim = dim
        self.place = place
        self.soft_cap = spec.soft_cap
        self.looks_ahead = spec.looks_ahead
        self.interleaved = spec.interleaved_rotary
        self.scale = (dim**-0.5 if spec.scale is None else spec.scale) * place.scale
        self.kernels = builder.kernels
        hidden = spec.hidden_size
        transposed = spec.transposed
        self.hidden_size = hidden
        self.gates_heads = spec.output_gate == "by_head"
        self.output_gate = bool(spec.output_gate) and not self.gates_heads
        inputs = spec.input_size or hidden
        parts = share.parts(spec, names)
        self.qkv = ColumnParallelLinear(builder, inputs, parts, spec.qkv_bias, transposed)
        self.value_dim = spec.value_dim or dim
        self.value_scale = spec.value_scale
        inner = (share.heads.start * self.value_dim, share.heads.stop * self.value_dim)
        results = spec.num_heads * self.value_dim
        self.out = RowParallelLinear(
            builder, names["o"], results, inner, hidden, spec.output_bias, transposed, share.is_copy
        )
        self.low_rank = LowRankQueries(builder, spec, names, share.heads) if spec.query_rank else None
        self.q_norm, self.k_norm = self._qk_norms(builder, spec, names, share)
        self.value_norm = None if spec.value_norm is None else make_norm(builder, "", dim, spec.value_norm)
        self.sub_norm = None
        if spec.sub_norm is not None:
            name = names["attention_sub_norm"]
            weight = 0.0 if share.is_copy else 1.0
            self.sub_norm = make_qk_norm(builder, name, spec.sub_norm, "all", dim, spec.num_heads, share.heads, weight)
        self.norm_after_rotary = spec.norm_after_rotary
        self.qkv_clip = spec.qkv_clip
        self.temperature = spec.temperature
        self.alibi = None
        if spec.alibi:
            self.alibi = AlibiSlopes(spec.num_heads, share.heads, builder, self.scale if spec.alibi_unscaled else 1.0)
        self.bias: Tensor | None = None
        if spec.buckets is not None:
            self.bias = distance_bias(builder, spec, names["distance_bias"], share.heads)
        elif spec.root_reach:
            self.bias = root_bias(builder, spec, share.heads)
        self.sinks = None
        if spec.sinks:
            self.sinks = builder.parameter(self.num_heads, dtype=torch.float32)
            builder.part(names["sinks"], self.sinks, (spec.num_heads,), slice(share.heads.start, share.heads.stop))

        self.blend = BlendGate(builder, names["blend_gate"], spec, share.heads) if spec.blends else None
        self.preparing: PreparingBackend | None = None  # set if one pass can norm, rotate and store

    def _qk_norms(
        self, builder: Builder, spec: AttentionSpec, names: dict[str, str], share: HeadShare
    ) -> tuple[QKNorm | None, QKNorm | None]:
        norm = spec.qk_norm
        if norm is None:
            return None, None
        over = spec.qk_norm_over
        dim = spec.head_dim
        q_weight, k_weight = (0.0, 0.0) if share.is_copy else (1.0, 1 / share.holders)
        q_name = names.get("q_norm", "")
        own = norm if q_name else replace(norm, affine=False)
        q_norm = make_qk_norm(builder, q_name, own, over, dim, spec.num_heads, share.heads, q_weight)
        k_name = names["k_norm"] if self.has_cache else None
        return q_norm, make_qk_norm(builder, k_name, norm, over, dim, spec.num_kv_heads, share.kv_heads, k_weight)

    def bind(self, backend: AttentionBackend, cache: Tensor) -> None:
        super().bind(backend, cache)
        norms = (self.q_norm, self.k_norm)
        chosen = self.kernels.chosen
        by_head = norms == (None, None) or all(isinstance(norm, RMSNorm) for norm in norms)
        if (
            not isinstance(backend, PreparingBackend)
            or not by_head
            or self.alibi is not None
            or self.norm_after_rotary
            or self.qkv_clip
            or self.value_norm is not None
            or not self.has_cache
        ):
            return
        if chosen["rms_norm"] == chosen["rotary_embedding"] == backend.kernels:
            self.preparing = backend

    def __call__(self, x: Rows, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        """x: [tokens, inputs] -> [tokens or len(wanted), hidden], this rank's summand. The keys and values of all
        tokens are stored."""
        assert self.backend is not None, "bind the cache first"
        assert self.cache is not None
        place = self.place
        q, k, v, gate = self.project(x, state.slots)
        plan = state.plans[place.kv_group]
        if self.preparing is not None:
            self.preparing.prepare(self.cache, q, k, v, plan, self._preparation(state))
        else:
            q, k = self.rotate(q, k, state)
            if self.alibi is not None:
                q, k, v = self.alibi.extend(q, k, v, state.inputs.positions)
            if self.has_cache:
                self.backend.store(self.cache, k, v, plan)
        if wanted is not None and not len(wanted):
            return q.new_empty(0, self.hidden_size)  # only keys and values are needed
        if (rise := self.temperature) is not None:
            q = self.kernels.sharpen(q, state.inputs.positions, rise.scale, rise.length, rise.offset)
        out, lse = self.backend.attend(
            q,
            self.cache,
            plan,
            scale=self.scale,
            window=place.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            bias=self.bias,
        )
        if self.blend is not None and place.blended_group is not None:
            out = self.blend(q, out, state.plans[place.blended_group], self.scale)
        if (media := state.inputs.media) is not None and media.spans and self.looks_ahead:
            ahead, ahead_lse = media.look_ahead(q, k, v, self.scale, self.soft_cap)
            out, _ = self.kernels.merge_partials(torch.stack((out, ahead)), torch.stack((lse, ahead_lse)))
        out = self._result(out if self.alibi is None else self.alibi.without(out), gate, wanted)
        return self.out(out, state.slots_of(wanted))

    def _result(self, out: Tensor, gate: Tensor, wanted: Tensor | None) -> Tensor:
        """Return the input of the output projection. out: [tokens, heads, head_dim]; gate: see `project`"""
        out = pick(out, wanted)
        if self.value_dim < self.head_dim:
            out = self.kernels.join(out[..., : self.value_dim], out[..., :0])
        if self.sub_norm is not None:
            out = self.sub_norm(out)
        out = out.reshape(len(out), self.num_heads * self.value_dim)
        if self.value_scale != 1:
            out = self.kernels.multiply(out, self.value_scale)
        if self.gates_heads:
            factors = self.kernels.activate(pick(gate, wanted), "sigmoid").view(-1, 1)
            out = self.kernels.multiply(out.view(-1, self.value_dim), factors).view(out.shape)
        if self.output_gate:
            out = self.kernels.gated_norm(out, pick(gate.flatten(1), wanted), None, 0.0, 1, False, "sigmoid")
        return out

    def project(self, x: Rows, slots: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x: [tokens, inputs] -> queries, keys, values and gates, each [tokens, heads or kv_heads, head_dim]"""
        heads = self.num_heads
        kv_heads = self.num_kv_heads
        qkv = self.qkv(x, slots)
        if self.low_rank is not None:
            latent, rest = torch.split(qkv, [self.low_rank.rank, qkv.shape[1] - self.low_rank.rank], 1)
            q = self.low_rank(latent, slots).view(len(qkv), heads, self.head_dim)
            k, v = rest.view(len(qkv), 2, kv_heads, self.head_dim).unbind(1)
            return q, k, v, q[:, :0]
        if self.value_dim < self.head_dim:
            return self._with_short_values(qkv)
        if self.gates_heads:
            return self._with_gates_of_heads(qkv)
        qkv = qkv.view(len(qkv), -1, self.head_dim)
        queries = heads * (2 if self.output_gate else 1)
        keys = queries + kv_heads
        v = qkv[:, keys:]
        v = self._clipped(v)
        if self.value_norm is not None:
            v = self.value_norm(v)
        return qkv[:, :heads], qkv[:, queries:keys], v, qkv[:, heads:queries]

    def _with_gates_of_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the result of `project`. The gates are [tokens, heads]."""
        heads = self.num_heads
        keys = heads + self.num_kv_heads
        wide, gate = torch.split(qkv, [qkv.shape[1] - heads, heads], 1)
        by_head = wide.view(len(qkv), -1, self.head_dim)  # [tokens, heads + 2 * kv_heads, head_dim]
        return by_head[:, :heads], by_head[:, heads:keys], by_head[:, keys:], gate

    def _with_short_values(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the result of `project`. Values are extended to head_dim by elements of keys, and the additional
        elements of attention's result are dropped."""
        tokens = len(qkv)
        dim = self.head_dim
        queries = self.num_heads * dim
        keys = queries + self.num_kv_heads * dim
        q = qkv[:, :queries].view(tokens, -1, dim)
        k = qkv[:, queries:keys].view(tokens, -1, dim)
        v = self.kernels.join(qkv[:, keys:].view(tokens, -1, self.value_dim), k[..., self.value_dim :])
        return q, k, v, q[:, :0]

    def rotate(self, q: Tensor, k: Tensor, state: ForwardState) -> tuple[Tensor, Tensor]:
        """Return queries and keys, normed and rotated to their positions."""
        if not self.norm_after_rotary:
            q, k = self._normed(q, k)
        if self.place.rotary is not None:
            q, k = self.kernels.rotary_embedding(q, k, *state.rotary[self.place.rotary], self.interleaved)
        return self._normed(q, k) if self.norm_after_rotary else (q, k)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return self._clipped(q), self._clipped(k)

    def _clipped(self, x: Tensor) -> Tensor:
        return x if self.qkv_clip is None else self.kernels.clip(x.flatten(1), self.qkv_clip).view(x.shape)

    def _preparation(self, state: ForwardState) -> Preparation:
        cos, sin = (None, None) if self.place.rotary is None else state.rotary[self.place.rotary]
        if not (isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm)):
            return Preparation(None, None, 0.0, cos, sin, self.interleaved)
        return Preparation(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, cos, sin, self.interleaved)


class EncoderAttention(Attention):
    """Attention to all tokens of a sequence, or to those within place.window on both sides.

    Nothing is cached, so a step contains whole sequences.
    """

    def __call__(self, x: Rows, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        q, k, v, _ = self.project(x, state.slots)
        q, k = self.rotate(q, k, state)
        starts = state.inputs.query_start_loc
        out = self.kernels.encoder_attention(q, k, v, starts, self.scale, self.place.window, self.bias)
        return self.out(pick(out.flatten(1), wanted), state.slots_of(wanted))
