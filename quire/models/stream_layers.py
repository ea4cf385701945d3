"""Layers that use several residual streams, which x contains: [tokens, streams * hidden]."""

from typing import Any

import torch
from torch import Tensor

from quire.layers.altup import AltUp, Laurel
from quire.layers.attention_spec import LayerPlace
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState, pick
from quire.layers.hyper import HyperConnection, MixingConnection
from quire.layers.mamba2 import Mamba2
from quire.layers.norm import make_norm
from quire.layers.per_layer import PerLayerBranch
from quire.layers.shared_block import SharedBlock
from quire.layers.specs import MoESpec
from quire.layers.state_spec import Mamba2Spec, SharedBlockSpec
from quire.models.decoder_layers import DecoderLayer
from quire.models.spec import DecoderSpec


class AltUpLayer(DecoderLayer):
    """Computes the first of several streams, and predicts the others (Gemma 3n). x: [tokens, streams * hidden]; there
    is no other residual."""

    def __init__(self, builder: Builder, spec: DecoderSpec, index: int, place: LayerPlace) -> None:
        super().__init__(builder, spec, index, place)
        assert spec.altup is not None
        assert spec.per_layer is not None
        names = spec.names_in(index)
        hidden = spec.hidden_size
        self.altup = AltUp(builder, spec.altup, hidden, spec.norm, names)
        self.laurel = Laurel(builder, spec.altup.laurel_rank, hidden, spec.norm, names)
        self.branch = PerLayerBranch(builder, spec.per_layer, index, hidden, spec.norm, names)

    def __call__(
        self, x: Tensor, residual: Tensor | None, state: ForwardState, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        stream = self.residual_stream
        tokens = state.inputs.positions
        assert state.per_layer is not None
        predicted = self.altup.predict(x)
        active = predicted[:, 0].contiguous()
        normed = self.attention_norm(active)
        out = self.mixer(stream.whole(normed, tokens), state, wanted)
        attended = self.attention_post_norm(stream.sum(out))
        predicted, active, laurel = (
            stream.pick(part, wanted, tokens) for part in (predicted, active, self.laurel(normed))
        )
        computed = (active + attended + laurel) * 2.0**-0.5
        to_mlp = stream.whole(self.mlp_norm(computed), out)
        computed = computed + self.mlp_post_norm(stream.sum(self.mlp(to_mlp, state.slots_of(wanted))))
        streams, first = self.altup.correct(predicted, computed)
        added = self.branch(first, stream.pick(state.per_layer, wanted, tokens), None)
        return torch.cat((streams[:, :1], streams[:, 1:] + added[:, None]), 1).flatten(1), None


class HyperLayer(DecoderLayer):
    """Each branch reads a weighted sum of several streams, and is added to them with weights (Hunyuan 4, DeepSeek-V4).
    x: [tokens, streams * hidden]; there is no other residual."""

    def __init__(self, builder: Builder, spec: DecoderSpec, index: int, place: LayerPlace) -> None:
        super().__init__(builder, spec, index, place)
        assert spec.hyper is not None
        names = spec.names_in(index)
        make = MixingConnection if spec.hyper.balances else HyperConnection
        self.hashed = isinstance(mlp := spec.mlps[index], MoESpec) and mlp.hashed > 0
        self.around_mixer, self.around_mlp = (
            make(builder, spec.hyper, spec.hidden_size, spec.norm.eps, names[role])
            for role in ("hyper_attention", "hyper_mlp")
        )

    def __call__(
        self, x: Tensor, residual: Tensor | None, state: ForwardState, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        stream = self.residual_stream
        tokens = state.inputs.positions
        read, weights = self.around_mixer.read(x)
        out = self.mixer(stream.whole(self.attention_norm(read), tokens), state, wanted)
        x, weights = (stream.pick(part, wanted, tokens) for part in (x, weights))
        x = self.around_mixer.add(x, stream.sum(out), weights)
        read, weights = self.around_mlp.read(x)
        if self.hashed:
            ids = pick(state.inputs.input_ids, wanted)
            done = stream.sum(self.mlp(stream.whole(self.mlp_norm(read), out), state.slots_of(wanted), ids=ids))
        else:
            done = self._feed_forward(self.mlp_norm(read), x, out, state.slots_of(wanted))
        return self.around_mlp.add(x, done, weights), None


class CycleLayer(DecoderLayer):
    """A layer of a stack that computes one of two states from both (HRM). x: both states and the layer's input,
    [tokens, 3 * hidden]; there is no other residual."""

    def __init__(self, builder: Builder, spec: DecoderSpec, index: int, place: LayerPlace) -> None:
        super().__init__(builder, spec, index, place)
        assert spec.cycles is not None
        self.stack_norm = make_norm(builder, "", spec.hidden_size, spec.norm)
        self.take_place(spec, index)

    def take_place(self, spec: DecoderSpec, index: int) -> None:
        assert spec.cycles is not None
        self.is_first, self.is_last, self.is_high = spec.cycles.place(index)

    def __call__(
        self, x: Tensor, residual: Tensor | None, state: ForwardState, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        high, low, within = (part.contiguous() for part in x.chunk(3, 1))
        if self.is_first:
            within = self.kernels.add(high, low, within)
        out, rest = super().__call__(within, None, state, wanted)
        assert rest is not None
        within = self.kernels.add(out, rest, rest)
        high, low = (self.residual_stream.pick(part, wanted, state.inputs.positions) for part in (high, low))
        if self.is_last:
            within = self.stack_norm(within)
            high, low = (within, low) if self.is_high else (high, within)
        return torch.cat((high, low, within), 1), None


class BlockLayer(DecoderLayer):
    """A state-space layer, to whose input the result of a shared block may be added (Zamba2). x: the stream and the
    embeddings, [tokens, 2 * hidden]; there is no other residual."""

    def __init__(self, builder: Builder, spec: DecoderSpec, index: int, place: LayerPlace) -> None:
        self.mlp = None
        names = spec.names_in(index)
        mixer = spec.mixers[index]
        self.residual_stream = builder.residual_stream
        self.kernels = builder.kernels
        self.block = None
        if isinstance(mixer, SharedBlockSpec):
            self.block = SharedBlock(builder, mixer, spec.norm, names, place)
            mixer = mixer.recurrent
        assert isinstance(mixer, Mamba2Spec)
        self.norm = make_norm(builder, names["attention_norm"], spec.hidden_size, spec.norm)
        self.mixer = Mamba2(builder, mixer, names, place)

    def reader(self, role: str) -> Any:
        return self.block.attention if role == "kv" and self.block is not None else self.mixer

    def __call__(
        self, x: Tensor, residual: Tensor | None, state: ForwardState, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        stream = self.residual_stream
        tokens = state.inputs.positions
        main, embeddings = (part.contiguous() for part in x.chunk(2, 1))
        read = main
        if self.block is not None:
            added = self.block(x, state)
            read = self.kernels.add(main, added, added)
        out = stream.sum(self.mixer(stream.whole(self.norm(read), tokens), state, wanted))
        main, embeddings = (stream.pick(part, wanted, tokens) for part in (main, embeddings))
        return torch.cat((self.kernels.add(main, out, out), embeddings), 1), None
