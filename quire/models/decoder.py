"""The only decoder and encoder. A DecoderSpec describes the layers it is built from."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, CacheBackend
from quire.attention.cross import store_plan
from quire.kv.specs import CacheEntry, ModelKVSpec
from quire.layers.altup import Streams
from quire.layers.attention_spec import LayerPlace
from quire.layers.build import Builder
from quire.layers.cycles import CycleStates, WithEmbeddings
from quire.layers.embedding import LearnedPositions, LMHead, VocabParallelEmbedding
from quire.layers.forward_state import ForwardState
from quire.layers.hyper import HyperStreams
from quire.layers.linear import ReplicatedLinear
from quire.layers.norm import make_norm
from quire.layers.per_layer import PerLayerEmbedding
from quire.layers.rotary import RotaryEmbedding
from quire.layers.step_media import StepMedia
from quire.models.decoder_layers import (
    CrossLayer,
    CrossPostNormLayer,
    DecoderLayer,
    IdleLayer,
    ParallelLayer,
    PostNormLayer,
    ScaledLayer,
    ShiftedLayer,
    SingleLayer,
    SkipLayer,
)
from quire.models.kv_groups import kv_groups, short_window
from quire.models.model import Model, Shape
from quire.models.spec import DecoderSpec
from quire.models.stream_layers import AltUpLayer, BlockLayer, CycleLayer, HyperLayer
from quire.parallel.pipeline import Stage

# By DecoderSpec.residual
LAYERS: dict[str, type[DecoderLayer]] = {
    "sequential": DecoderLayer,
    "parallel": ParallelLayer,
    "post_norm": PostNormLayer,
    "single": SingleLayer,
    "cross": CrossLayer,
    "cross_post_norm": CrossPostNormLayer,
    "shifted": ShiftedLayer,
    "scaled": ScaledLayer,
    "altup": AltUpLayer,
    "hyper": HyperLayer,
    "cycle": CycleLayer,
    "blocks": BlockLayer,
}


def layer_class(spec: DecoderSpec, index: int) -> type[DecoderLayer]:
    """Return the kind of a layer, by its connections and its branches."""
    if any(index in (skip.source, skip.target) for skip in spec.skips):
        return SkipLayer
    missing = (spec.mixers[index], spec.mlps[index]).count(None)
    if spec.residual == "sequential" and missing:
        return SingleLayer if missing == 1 else IdleLayer
    return LAYERS[spec.residual]


class LayerStack:
    """The layers of a decoder, over a paged KV cache. Whole models and drafters' heads share them."""

    def __init__(self, builder: Builder, spec: DecoderSpec, max_model_len: int, layers: range | None = None) -> None:
        """layers: the layers of this pipeline stage, None for all."""
        self.spec = spec
        self.kernels = builder.kernels
        self.residual_stream = builder.residual_stream
        own = range(spec.num_layers) if layers is None else layers
        groups = kv_groups(spec, max_model_len, builder.tensor_group)
        self.cache_shapes: Sequence[Shape] = groups.cache_shapes
        self.kv_specs: Sequence[ModelKVSpec] = [kv_spec.of_layers(own) for kv_spec in groups.kv_specs]
        group_of = {entry: g for g, kv_spec in enumerate(self.kv_specs) for entry in kv_spec.entries}
        variants = list(dict.fromkeys(r for r in spec.rotary if r is not None))
        self.rotary: Sequence[Callable[[Tensor], tuple[Tensor, Tensor]]] = [
            RotaryEmbedding(r, max_model_len, builder.device) for r in variants
        ]
        self.first_layer = own.start
        self.layers = list[DecoderLayer]()
        for i in own:
            rotary = spec.rotary[i]
            table = None if rotary is None else variants.index(rotary)
            scale = spec.score_scales[i] if spec.score_scales else 1.0
            source = getattr(spec.mixers[i], "source", None)
            kv = group_of.get(CacheEntry(i if source is None else source, "kv"), 0)
            state, cross, entries, inputs = (
                group_of.get(CacheEntry(i, role), 0) for role in ("state", "cross", "entries", "inputs")
            )
            blended = getattr(spec.mixers[i], "blended", None)
            blended_group = None if blended is None else group_of.get(CacheEntry(blended, "kv"))
            window = short_window(spec, i, max_model_len)
            place = LayerPlace(kv, window, table, scale, state, cross, entries, inputs, blended_group)
            first = spec.first_use(i, own)
            if first < i:
                self.layers.append(self.layers[first - own.start].again(spec, i, place))
            else:
                self.layers.append(layer_class(spec, i)(builder, spec, i, place))

    def bind_cache(self, backends: Sequence[CacheBackend], memory: Sequence[Tensor]) -> None:
        self.backends = backends
        for kv_spec, backend, blocks in zip(self.kv_specs, backends, memory, strict=True):
            starts = kv_spec.starts(backend.entry_bytes)
            for entry, start in zip(kv_spec.entries, starts[:-1], strict=True):
                cache = backend.of_role(entry.role).view_at(blocks, start)
                self.layers[entry.layer - self.first_layer].reader(entry.role).bind(backend, cache)
                for layer, mixer in zip(self.layers, self.spec.mixers[self.first_layer :], strict=False):
                    if getattr(mixer, "source", None) == entry.layer and entry.role == "kv":
                        layer.mixer.bind(backend, cache)
                    if getattr(mixer, "blended", None) == entry.layer and entry.role == "kv":
                        layer.mixer.blend.bind(backend, cache)

    def store_encoded(self, states: Tensor, group: int, blocks: Tensor, slots: Tensor | None = None) -> None:
        layers = [self.layers[entry.layer - self.first_layer].cross for entry in self.kv_specs[group].entries]
        backend = self.backends[group]
        assert isinstance(backend, AttentionBackend)
        plan = store_plan(backend, blocks, len(states))
        for cross in layers:
            assert cross is not None
            cross.store(states, plan, slots)

    def run(
        self, x: Tensor, state: ForwardState, wanted: Tensor | None = None, taps: Mapping[int, Tensor] = {}
    ) -> tuple[Tensor, Tensor | None]:
        """Return the last branch's result and the residual stream to which it has yet to be added, for this rank's
        tokens. See Model.forward for the arguments. For tokens that are not `wanted`, the last layer computes only keys
        and values."""
        residual: Tensor | None = None
        start = 0
        last = len(self.layers) - 1
        for tapped in sorted(taps):
            stop = tapped + 1 - self.first_layer
            x, residual = self._through(start, stop, x, residual, state)
            self._copy_stream(x, residual, taps[tapped][: len(state.inputs.positions)])
            start = stop
        x, residual = self._through(start, last, x, residual, state)
        if start <= last:
            x, residual = self.layers[last](x, residual, state, wanted)
            if (media := state.inputs.media) is not None:
                media.add_level(self.first_layer + last, x, wanted)
            return x, residual
        tokens = state.inputs.positions
        stream = self.residual_stream
        return stream.pick(x, wanted, tokens), None if residual is None else stream.pick(residual, wanted, tokens)

    def _through(
        self, start: int, stop: int, x: Tensor, residual: Tensor | None, state: ForwardState
    ) -> tuple[Tensor, Tensor | None]:
        media = state.inputs.media
        for index, layer in enumerate(self.layers[start:stop], self.first_layer + start):
            x, residual = layer(x, residual, state)
            if media is not None:
                media.add_level(index, x)
            if state.layer_done is not None:
                state.layer_done()
        return x, residual

    def _copy_stream(self, x: Tensor, residual: Tensor | None, tap: Tensor) -> None:
        """Write the residual stream, including x, the result of the last branch, to `tap`: [tokens, hidden]."""
        own = self.residual_stream.own(tap)
        if residual is None:
            own.copy_(x)
        else:
            self.kernels.add(x, residual, own)
        self.residual_stream.complete(tap)


class Decoder(LayerStack, Model):
    """A decoder-only language model over a paged KV cache, or an encoder without one."""

    def __init__(self, builder: Builder, spec: DecoderSpec, max_model_len: int, stage: Stage | None = None) -> None:
        """stage: this rank's pipeline stage, None for the whole model."""
        self.spec, self.stage = spec, stage or Stage(range(spec.num_layers))
        stage = self.stage
        self.vocab_size = spec.vocab_size
        self.hidden_size = spec.hidden_size
        self.stream_size = spec.hidden_size * spec.streams
        self.num_token_ids = spec.vocab_size * max(1, spec.token_types)
        self.sees = spec.media is not None, spec.has_sections
        names = {key: name for key, name in spec.names.items() if name is not None}
        embedding_size = spec.embedding_size or spec.hidden_size
        if stage.has_embedding:
            self._make_embedding(builder, names, embedding_size)
        self.streams: Streams | HyperStreams | CycleStates | WithEmbeddings | None = None
        if spec.altup is not None:
            self.streams = Streams(builder, spec.altup, spec.hidden_size, names)
        elif spec.hyper is not None:
            head = names.get("hyper_head")
            self.streams = HyperStreams(builder, spec.hyper, spec.hidden_size, spec.norm.eps, head)
        elif spec.cycles is not None:
            self.streams = CycleStates(builder, spec.hidden_size, names["first_low"])
        elif spec.residual == "blocks":
            self.streams = WithEmbeddings()
        super().__init__(builder, spec, max_model_len, stage.layers)
        self.project_out: ReplicatedLinear | None = None
        self.lm_head: LMHead | None = None
        if stage.has_head:
            self._make_head(builder, names, embedding_size)
        self.num_parameters = builder.num_parameters
        self.adapters = builder.adapters
        self.experts = builder.experts

    def _make_embedding(self, builder: Builder, names: Mapping[str, str], embedding_size: int) -> None:
        spec = self.spec
        name = names["embedding"]
        if name not in builder.shared:
            table = VocabParallelEmbedding(builder, name, spec.vocab_size, embedding_size, bool(spec.tie_embeddings))
            builder.shared[name] = table
        self.embedding: VocabParallelEmbedding = builder.shared[name]
        self.embedding_scale = None
        if spec.embedding_scale is not None:  # rounded to the model's type, as in training
            self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=builder.dtype, device=builder.device)
        self.positions = self.project_in = None
        if spec.position_offset is not None:
            self.positions = LearnedPositions(
                builder, names["positions"], spec.max_positions, spec.hidden_size, spec.position_offset
            )
        self.segments = None
        if spec.token_types:
            self.segments = builder.whole(f"{names['segments']}.weight", spec.token_types, spec.hidden_size)
        self.embedding_norm = make_norm(
            builder, names.get("embedding_norm"), spec.hidden_size, spec.norm_of("embedding_norm")
        )
        self.per_layer: PerLayerEmbedding | None = None
        if spec.per_layer is not None:
            layers = spec.num_layers
            self.per_layer = PerLayerEmbedding(builder, spec.per_layer, layers, spec.hidden_size, spec.norm, {**names})
        if embedding_size != spec.hidden_size:
            self.project_in = ReplicatedLinear(builder, names["project_in"], embedding_size, spec.hidden_size)

    def _make_head(self, builder: Builder, names: Mapping[str, str], embedding_size: int) -> None:
        spec = self.spec
        if embedding_size != spec.hidden_size:
            self.project_out = ReplicatedLinear(builder, names["project_out"], spec.hidden_size, embedding_size)
        self.final_norm = make_norm(builder, names.get("final_norm"), spec.hidden_size, spec.norm_of("final_norm"))
        if "lm_head" in names:
            tied = self.embedding if spec.tie_embeddings else None
            bias = names.get("lm_head_bias") if spec.lm_head_bias else None
            self.lm_head = LMHead(
                builder, names["lm_head"], spec.vocab_size, embedding_size, tied, spec.lm_head_bias, bias
            )

    @property
    def input_size(self) -> int:
        own = self.spec.per_layer
        return self.stream_size + (0 if own is None else self.spec.num_layers * own.size)

    def forward(
        self, x: Tensor, state: ForwardState, wanted: Tensor | None = None, taps: Mapping[int, Tensor] = {}
    ) -> Tensor:
        """A stage without a head returns the residual stream after its last layer, [own tokens, hidden]."""
        if self.input_size != self.stream_size:
            state.per_layer = x[:, self.stream_size :]
            x = self.kernels.multiply(x[:, : self.stream_size], 1.0)  # contiguous
        x, residual = self.run(x, state, wanted, taps)
        if self.stage.has_head:
            tokens = state.inputs.positions if wanted is None else wanted
            x = x if self.streams is None else self.streams.merge(x)
            return self.residual_stream.whole(self.final_norm.add(x, residual)[0], tokens)
        if residual is not None:
            self.kernels.add(x, residual, x)
        return x

    def embed_with(self, media: StepMedia, ids: Tensor, positions: Tensor, slots: Tensor | None = None) -> Tensor:
        if self.per_layer is None and self.streams is None:
            return media.fill(self.embed(ids, positions, slots))
        if self.per_layer is not None:
            ids = ids.index_fill(0, media.tokens, self.per_layer.padding)
        return self.embed(ids, positions, slots, media)

    def embed(
        self, ids: Tensor, positions: Tensor, slots: Tensor | None = None, media: StepMedia | None = None
    ) -> Tensor:
        """In a model with segment types, n * vocab_size is added to the ids of segment type n: tokens of the second
        segment have ids + vocab_size. media: if other parts of the result are computed from embeddings."""
        kinds = None
        if self.segments is not None:
            kinds = ids // self.vocab_size
            ids = ids % self.vocab_size
        x = self.embedding(ids, slots)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        if media is not None:
            x = media.fill(x)
        if self.project_in is not None:
            x = self.project_in(x, slots)
        if self.positions is not None:
            x = x + self.positions(positions)
        if self.segments is not None and kinds is not None:
            x = x + torch.nn.functional.embedding(kinds, self.segments)
        streams = x if self.streams is None else self.streams.split(x)
        if self.per_layer is not None:
            return self.residual_stream.own(torch.cat((streams, self.per_layer(ids, x, slots)), 1))
        return self.embedding_norm(self.residual_stream.own(streams))

    def logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        spec = self.spec
        assert self.lm_head is not None, "the model has no head"
        if self.project_out is not None:
            hidden = self.project_out(hidden, slots)
        logits = self.lm_head(hidden, slots)
        if spec.logit_scale is not None:
            logits = logits * spec.logit_scale
        if spec.logit_soft_cap is not None:
            logits = torch.tanh(logits / spec.logit_soft_cap) * spec.logit_soft_cap
        return logits
