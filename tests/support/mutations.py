"""Mutations: changes of a spec or of a loaded model that make it compute something wrong."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quire.layers.attention import Attention
from quire.layers.attention_spec import AttentionSpec
from quire.layers.moe import MoE
from quire.layers.norm import Norm
from quire.layers.rotary_spec import RotarySpec
from quire.layers.specs import MoESpec
from quire.models.decoder import Decoder
from quire.models.spec import DecoderSpec

SpecMutation = Callable[[DecoderSpec], DecoderSpec]
ModelMutation = Callable[[Decoder], None]

# ---- of the spec: new values of fields, or functions of the old ones


class NoNorm(Norm):
    """The identity."""

    def __init__(self) -> None:
        pass

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = x if residual is None else residual.add_(x)
        return residual, residual


def _changed(value: Any, fields: dict[str, Any]) -> Any:
    return replace(value, **{k: new(getattr(value, k)) if callable(new) else new for k, new in fields.items()})


def decoder(**fields: Any) -> SpecMutation:
    return lambda spec: _changed(spec, fields)


def attention(**fields: Any) -> SpecMutation:
    return lambda spec: replace(spec, mixers=tuple(_changed(mixer, fields) for mixer in spec.mixers))


def mixers(kind: type, **fields: Any) -> SpecMutation:
    """Change fields of the layers of one kind."""

    def mutate(spec: DecoderSpec) -> DecoderSpec:
        return replace(spec, mixers=tuple(_changed(m, fields) if isinstance(m, kind) else m for m in spec.mixers))

    return mutate


def selecting(top_k: int) -> Callable[[Any], Any]:
    """A function of compressed entries, to change how many of them an indexer selects."""
    return lambda entries: (
        entries and replace(entries, indexer=entries.indexer and replace(entries.indexer, top_k=top_k))
    )


def indexer(**fields: Any) -> SpecMutation:
    return attention(indexer=lambda indexer: _changed(indexer, fields))


def norm(**fields: Any) -> SpecMutation:
    return lambda spec: replace(spec, norm=_changed(spec.norm, fields))


def mlp(**fields: Any) -> SpecMutation:
    return lambda spec: replace(spec, mlps=tuple(_changed(m, fields) for m in spec.mlps))


def experts(**fields: Any) -> SpecMutation:
    def mutate(spec: DecoderSpec) -> DecoderSpec:
        return replace(spec, mlps=tuple(_changed(m, fields) if isinstance(m, MoESpec) else m for m in spec.mlps))

    return mutate


def rotary(**fields: Any) -> SpecMutation:
    return lambda spec: replace(spec, rotary=tuple(r and _changed(r, fields) for r in spec.rotary))


def scaling(**fields: Any) -> SpecMutation:
    """Change fields of the scaling, in layers that have one."""

    def mutate(spec: DecoderSpec) -> DecoderSpec:
        def scaled(r: RotarySpec | None) -> RotarySpec | None:
            return r if r is None or r.kind == "default" else replace(r, scaling={**r.scaling, **fields})

        return replace(spec, rotary=tuple(map(scaled, spec.rotary)))

    return mutate


def windows(change: Callable[[int], int | None]) -> SpecMutation:
    return lambda spec: replace(spec, windows=tuple(w and change(w) for w in spec.windows))


def exchanged(*roles: str) -> SpecMutation:
    """Exchange the checkpoint names of two roles."""
    a, b = roles
    return lambda spec: replace(spec, names={**spec.names, a: spec.names.get(b), b: spec.names.get(a)})


def rotated_alike(spec: DecoderSpec) -> DecoderSpec:
    """Give all layers the rotary spec of the first layer that has one."""
    return replace(spec, rotary=(next(filter(None, spec.rotary)),) * spec.num_layers)


def windows_everywhere(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, windows=(max(w for w in spec.windows if w),) * spec.num_layers)


def usual_scale(spec: DecoderSpec) -> DecoderSpec:
    return attention(scale=None)(spec)


def head_rotated_whole(spec: DecoderSpec) -> DecoderSpec:
    (head_dim,) = {mixer.head_dim for mixer in spec.mixers if isinstance(mixer, AttentionSpec)}
    return rotary(rotary_dim=head_dim)(spec)


# ---- of the loaded model


def zeroed(pick: Callable[[Any], Tensor]) -> ModelMutation:
    """pick: returns the tensor to zero, from a layer or from the model."""

    def mutate(model: Decoder) -> None:
        for layer in model.layers:
            pick(layer).zero_()

    return mutate


def without(part: str, instead: Any = None) -> ModelMutation:
    """part: an attribute such as mixer.sinks. instead: its replacement."""
    *owner, name = part.split(".")

    def mutate(model: Decoder) -> None:
        for layer in model.layers:
            setattr(getattr(layer, owner[0]) if owner else layer, name, instead)

    return mutate


def without_norm(part: str) -> ModelMutation:
    return without(part, NoNorm())


def in_experts(change: Callable[[MoE], None]) -> ModelMutation:
    def mutate(model: Decoder) -> None:
        for layer in model.layers:
            if isinstance(layer.mlp, MoE):
                change(layer.mlp)

    return mutate


def in_states(change: Callable[[Any], Any]) -> ModelMutation:
    """Change the recurrent layers."""

    def mutate(model: Decoder) -> None:
        mixers = [getattr(layer.mixer, "recurrent", layer.mixer) for layer in model.layers]
        states = [mixer for mixer in mixers if hasattr(mixer, "pages")]
        assert states
        for mixer in states:
            change(mixer)

    return mutate


def no_norms_inside(mixer: Any) -> None:
    """The input of time steps, B and C are not normed."""
    mixer.norms = [NoNorm()] * 3


def one_decay(mixer: Any) -> None:
    """The elements of a key decay alike in all of its head."""
    mixer.dt_bias.copy_(mixer.dt_bias.view(mixer.num_heads, -1).mean(1).repeat_interleave(mixer.key_dim))


def smaller_steps(mixer: Any) -> None:
    """The steps of a delta rule are at most 1."""
    mixer.spec = replace(mixer.spec, step_scale=1.0)


def next_vectors(model: Decoder) -> None:
    """Each layer but the last reads the vectors of the next one."""
    for layer, following in pairwise(model.layers):
        layer.branch.part = following.branch.part


def open_gates(model: Decoder) -> None:
    """The gates of attention let everything pass."""
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, Attention)]
    mixers = [mixer for mixer in mixers if mixer.output_gate or mixer.gates_heads]
    assert mixers
    for mixer in mixers:
        mixer.project = partial(_with_open_gates, mixer.project)


def _with_open_gates(
    project: Callable[[Tensor, Tensor | None], tuple[Tensor, ...]], x: Tensor, slots: Tensor | None
) -> tuple[Tensor, ...]:
    *qkv, gate = project(x, slots)
    return *qkv, torch.full_like(gate, 100)


def of_model(change: Callable[[Decoder], Any]) -> ModelMutation:
    return change


def no_value_bias(model: Decoder) -> None:
    for layer in model.layers:
        layer.mixer.qkv.bias[-layer.mixer.num_kv_heads * layer.mixer.head_dim :].zero_()


def no_qk_norm(model: Decoder) -> None:
    for layer in model.layers:
        layer.mixer.q_norm = layer.mixer.k_norm = None


def qk_norm_after_rotary(model: Decoder) -> None:
    for layer in model.layers:
        attention, kernels = layer.mixer, copy(layer.mixer.kernels)
        q_norm, k_norm, rotate = attention.q_norm, attention.k_norm, kernels.rotary_embedding
        attention.q_norm = attention.k_norm = None

        def rotate_then_norm(q, k, cos, sin, interleaved, q_norm=q_norm, k_norm=k_norm, rotate=rotate):
            q, k = rotate(q, k, cos, sin, interleaved)
            return q_norm(q), k_norm(k)

        kernels.rotary_embedding = rotate_then_norm
        attention.kernels, attention.preparing = kernels, None


def qk_norm_of_each_head(model: Decoder) -> None:
    """Norm each head separately, instead of all heads as one vector."""
    for layer in model.layers:
        for name in ("q_norm", "k_norm"):
            norm = getattr(layer.mixer, name)

            def of_each_head(x, norm=norm):
                return functional.rms_norm(x, x.shape[-1:], eps=norm.eps) * norm.weight

            setattr(layer.mixer, name, of_each_head)


def qk_norm_weight_of_first_head(model: Decoder) -> None:
    """Use the norm weight of the first head for all heads."""
    for layer in model.layers:
        for norm in (layer.mixer.q_norm, layer.mixer.k_norm):
            norm.weight.copy_(norm.weight[:1].expand_as(norm.weight))


def heads_in_another_order(model: Decoder) -> None:
    """Assign query heads to KV heads in turn, although neighbours should share one."""
    for layer in model.layers:
        a = layer.mixer
        queries = a.qkv.weight.weight[: a.num_heads * a.head_dim].view(a.num_heads, a.head_dim, -1)  # a view
        order = torch.arange(a.num_heads).view(-1, a.num_kv_heads).T.flatten()
        queries.copy_(queries[order])


def tied(model: Decoder) -> None:
    model.lm_head.weight.weight = model.embedding.table.weight


def untied(model: Decoder) -> None:
    table = model.embedding.table.weight
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(99))
    model.lm_head.weight.weight = noise * table.std()


def positions_from_one(model: Decoder) -> None:
    """Not a mutation: rotation depends only on relative positions, so this must change nothing."""
    model.rotary = [lambda positions, table=table: table(positions + 1) for table in model.rotary]


def another_scale(model: Decoder) -> None:
    for layer in model.layers:
        layer.mixer.scale *= 1.01
