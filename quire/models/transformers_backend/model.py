"""Adapts a model of transformers to the interface between the worker and its model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import MoeModelOutputWithPast

from quire.attention.base import AttentionBackend, CacheBackend
from quire.kv.specs import attention_spec, group_entries
from quire.layers.attention_spec import CacheShape
from quire.layers.forward_state import ForwardState, pick
from quire.layers.lora import AdapterSlots
from quire.models.model import Model
from quire.models.transformers_backend.attention import PagedAttention, Step
from quire.models.transformers_backend.linear import LinearLayers
from quire.models.transformers_backend.probe import LayerAttention
from quire.ops import Kernels
from quire.parallel.mesh import Communicator
from quire.parallel.pipeline import Stage
from quire.parallel.residual_stream import ResidualStream


class _Hidden(MoeModelOutputWithPast):  # type: ignore[misc]
    """What a model's layers return, with None for the outputs of a few families."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Passed(torch.nn.Module):
    """Replaces a model's layers. So the model's own forward computes logits from existing hidden states, with all of
    its factors and caps."""

    def forward(self, *ids: None, inputs_embeds: Tensor, **others: Any) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)


class TransformersModel(Model):
    """network: the model, whose layers are moved to this one."""

    def __init__(
        self,
        network: Any,
        layers: Sequence[LayerAttention],
        linear: LinearLayers,
        step: Step,
        max_model_len: int,
        kernels: Kernels,
        group: Communicator,
        adapters: AdapterSlots | None,
        stage: Stage,
    ) -> None:
        """layers: of all stages. The network has those of this one."""
        self.kernels, self.stage, self.residual_stream = kernels, stage, ResidualStream(group)
        self.vocab_size = self.num_token_ids = network.config.vocab_size
        self.hidden_size = network.config.hidden_size
        self.rotary = []
        kept_parts = network if stage.has_head else network.base_model
        self.tensors = dict([*kept_parts.named_parameters(), *kept_parts.named_buffers()])
        self.linear_layers = linear.layers
        self.num_parameters = linear.num_parameters + sum(part.numel() for part in kept_parts.parameters())
        self.adapters = adapters
        self._body = network.base_model
        self._head = network if stage.has_head else None
        if self._body is not network:  # a model that pools has no head
            setattr(network, network.base_model_prefix, _Passed())
        shapes = [CacheShape(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers]
        kept = [attention_spec([i], layer.window) for i, layer in enumerate(layers)]
        groups = group_entries(kept, max_model_len, shapes)
        self.cache_shapes = [shapes[spec.layers[0]] for spec in groups]
        self.kv_specs = [spec.of_layers(stage.layers) for spec in groups]
        group_of = {layer: g for g, spec in enumerate(groups) for layer in spec.layers}
        self._step = step
        self._layers = [
            PagedAttention(self._step, group_of[i], layer.head_dim, layer.window) for i, layer in enumerate(layers)
        ]
        for layer, paged in zip(layers, self._layers, strict=True):
            layer.module.quire_attention = paged

    def bind_cache(self, backends: Sequence[CacheBackend], memory: Sequence[Tensor]) -> None:
        for spec, backend, blocks in zip(self.kv_specs, backends, memory, strict=True):
            assert isinstance(backend, AttentionBackend)
            for index, entry in enumerate(spec.entries):
                self._layers[entry.layer].bind(backend, backend.view(blocks, index))

    def embed(self, ids: Tensor, positions: Tensor, slots: Tensor | None = None) -> Tensor:
        embedded: Tensor = self._body.get_input_embeddings()(ids)
        return embedded

    def forward(
        self, x: Tensor, state: ForwardState, wanted: Tensor | None = None, taps: Mapping[int, Tensor] = {}
    ) -> Tensor:
        assert not taps, "only drafters on the device need them"
        self._step.plans = state.plans
        self._step.slots = state.slots
        out = self._body(inputs_embeds=x[None], position_ids=state.inputs.positions[None], use_cache=False)
        return pick(out.last_hidden_state[0], wanted)

    def logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        assert self._head is not None, "the model has no head"
        self._step.slots = slots
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits
