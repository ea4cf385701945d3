"""The layers of a decoder or an encoder: how a mixer and an MLP use the residual stream."""

from collections.abc import Callable
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from quire.layers.attention import Attention, EncoderAttention
from quire.layers.attention_spec import AttentionSpec, BlockAttentionSpec, LatentAttentionSpec, LayerPlace
from quire.layers.block_attention import BlockAttention
from quire.layers.build import Builder
from quire.layers.compressed_attention import CompressedAttention
from quire.layers.compressed_spec import CompressedAttentionSpec
from quire.layers.cross_attention import CrossAttention
from quire.layers.delta import DeltaNet
from quire.layers.experts_apart import ExpertsApart
from quire.layers.forward_state import ForwardState, pick
from quire.layers.hybrid import Hybrid
from quire.layers.latent_attention import LatentAttention
from quire.layers.lightning import Lightning
from quire.layers.mamba import Mamba
from quire.layers.mamba2 import Mamba2
from quire.layers.mlp import MLP
from quire.layers.moe import MoE
from quire.layers.norm import make_norm, rounding
from quire.layers.per_layer import PerLayerBranch
from quire.layers.rwkv import Rwkv
from quire.layers.short_conv import ShortConv
from quire.layers.specs import MLPSpec, MoESpec
from quire.layers.state_spec import DeltaSpec, HybridSpec, LightningSpec, Mamba2Spec, MambaSpec, RwkvSpec, ShortConvSpec
from quire.models.spec import DecoderSpec
from quire.parallel.residual_stream import ResidualStream

MIXERS: dict[type, Callable[..., Any]] = {
    AttentionSpec: Attention,
    LatentAttentionSpec: LatentAttention,
    BlockAttentionSpec: BlockAttention,
    CompressedAttentionSpec: CompressedAttention,
    MambaSpec: Mamba,
    Mamba2Spec: Mamba2,
    DeltaSpec: DeltaNet,
    HybridSpec: Hybrid,
    RwkvSpec: Rwkv,
    ShortConvSpec: ShortConv,
    LightningSpec: Lightning,
}


class DecoderLayer:
    """A mixer, then an MLP. Each is a branch of the residual stream, surrounded by the model's norms. A branch reads
    all tokens, and the ranks' results must be summed; see ResidualStream.
    """

    cross: CrossAttention | None = None

    def __init__(self, builder: Builder, spec: DecoderSpec, index: int, place: LayerPlace) -> None:
        names = spec.names_in(index)
        hidden = spec.hidden_size
        scale = spec.residual_scale
        self.residual_stream = builder.residual_stream
        self.kernels = builder.kernels

        def norm(role: str):  # type: ignore[no-untyped-def]
            return make_norm(builder, names.get(role), hidden, spec.norm_of(role))

        has_norm = index or spec.first_norm
        self.attention_norm = norm("attention_norm" if has_norm else "")
        self.attention_post_norm = norm("attention_post_norm")
        self.mixer: Any = None
        self.mlp: Any = None
        if (mixer := spec.mixers[index]) is not None:
            make: Callable[..., Any] = EncoderAttention if spec.is_encoder else MIXERS[type(mixer)]
            self.mixer = make(builder, mixer, names, place)
        self.mlp_norm, self.mlp_post_norm = norm("mlp_norm"), norm("mlp_post_norm")
        if (mlp := spec.mlps[index]) is not None:
            if isinstance(mlp, MLPSpec):
                self.mlp = MLP(builder, mlp, hidden, names)
            else:
                self.mlp = MoE(builder, mlp, hidden, names)
        self.scale = 1.0 if scale is None else scale
        if type(self) is DecoderLayer and type(self.residual_stream) is ResidualStream:
            builder.when_loaded(self._round_for_products)

    def _round_for_products(self) -> None:
        """Let the norms round their results to 8 bits, if the products that read them do so."""
        if type(self.mixer) is Attention:
            self.attention_norm = rounding(self.attention_norm, self.mixer.qkv.rounding())
        if isinstance(self.mlp, MLP):
            self.mlp_norm = rounding(self.mlp_norm, self.mlp.up.rounding())

    def again(self, spec: DecoderSpec, index: int, place: LayerPlace) -> Self:
        """Return a layer with the same weights in another place, before both are bound to a cache."""
        assert isinstance(self.mixer, Attention), "only attention can share its weights"
        other = copy(self)
        other.mixer = copy(self.mixer)
        other.mixer.blend = copy(self.mixer.blend)
        other.mixer.place = place
        other.take_place(spec, index)
        return other

    def take_place(self, spec: DecoderSpec, index: int) -> None:
        """Set what depends on the place among the layers, but not on weights."""

    def reader(self, role: str) -> Any:
        """Return the part of the layer that reads the cache entry of this role, see CacheEntry."""
        if role == "cross":
            return self.cross
        if role in ("entries", "entry_keys", "inputs"):
            return self.mixer.of_role(role)
        return self.mixer.indexer if role == "indexer" else self.mixer

    def __call__(
        self, x: Tensor, residual: Tensor | None, state: ForwardState, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x: the previous branch's result; residual: the stream to which x has yet to be added (None at first); both
        for this rank's tokens.

        wanted: indices of the tokens whose results are needed, None for all."""
        stream = self.residual_stream
        tokens = state.inputs.positions
        x, residual = self.attention_norm.add(x, residual)
        out = self.mixer(stream.whole(x, tokens), state, wanted)
        x = self.attention_post_norm(stream.sum(out))
        residual = stream.pick(residual, wanted, tokens)
        x, residual = self.mlp_norm.add(self._scaled(x), residual)
        x = self.mlp_post_norm(self._feed_forward(x, residual, out, state.slots_of(wanted)))
        return self._scaled(x), residual

    def _feed_forward(self, x: Tensor, residual: Tensor, tokens: Tensor, slots: Tensor | None) -> Tensor:
        """x: the normed stream of this rank's tokens; residual: the stream itself; tokens: any tensor with a row for
        each token -> the MLP's result, summed over the ranks."""
        return self.residual_stream.sum(self.mlp(self.residual_stream.whole(x, tokens), slots))

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1 else self.kernels.multiply(x, self.scale)


class ParallelLayer(DecoderLayer):
    """Attention and MLP read the same input, through one norm or through one norm each (GPT-NeoX, Falcon, Cohere). Both
    results are summed across ranks at once."""

    def __init__(self, builder: Builder, spec: DecoderSpec, index: int, place: LayerPlace) -> None:
        super().__init__(builder, spec, index, place)
        self.one_norm = spec.names.get("mlp_norm") is None

    def __call__(
        self, x: Tensor, residual: Tensor | None, state: ForwardState, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        stream = self.residual_stream
        tokens = state.inputs.positions
        x, residual = self.attention_norm.add(x, residual)
        x = stream.whole(x, tokens)
        residual = stream.pick(residual, wanted, tokens)
        out = self.mixer(x, state, wanted)
        to_mlp = pick(x, wanted) if self.one_norm else stream.whole(self.mlp_norm(residual), out)
        return stream.sum(self.kernels.add(self.mlp(to_mlp, state.slots_of(wanted)), out, out)), residual


class PostNormLayer(DecoderLayer):
    """The norm comes after the sum, so the stream itself is normed (OPT-350m and the original Transformer)."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, state: ForwardState, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        stream = self.residual_stream
        tokens = state.inputs.positions
        out = self.mixer(stream.whole(x, tokens), state, wanted)
        x, _ = self.attention_norm.add(stream.sum(out), stream.pick(x, wanted, tokens))
        x, _ = self.mlp_norm.add(stream.sum(self.mlp(stream.whole(x, out), state.slots_of(wanted))), x)
        return x, None


class CrossLayer(DecoderLayer):
    """A decoder layer with cross-attention to an encoder's output between its attention and its MLP."""

    cross: CrossAttention

    def __init__(self, builder: Builder, spec: DecoderSpec, index: int, place: LayerPlace) -> None:
        super().__init__(builder, spec, index, place)
        names = spec.names_in(index)
        self.cross_norm = make_norm(builder, names["cross_norm"], spec.hidden_size, spec.norm)
        mixer = spec.mixers[index]
        assert isinstance(mixer, AttentionSpec)
        self.cross = CrossAttention(builder, mixer, names, place.cross_group)

    def __call__(
        self, x: Tensor, residual: Tensor | None, state: ForwardState, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        stream = self.residual_stream
        tokens = state.inputs.positions
        x, residual = self.attention_norm.add(x, residual)
        x, residual = self.cross_norm.add(stream.sum(self.mixer(stream.whole(x, tokens), state)), residual)
        out = self.cross(stream.whole(x, tokens), state, wanted)
        x, residual = self.mlp_norm.add(stream.sum(out), stream.pick(residual, wanted, tokens))
        return stream.sum(self.mlp(stream.whole(x, out), state.slots_of(wanted))), residual


class CrossPostNormLayer(CrossLayer):
    """The same with norms after the residual sums (the original Transformer, BART)."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, state: ForwardState, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        stream = self.residual_stream
        tokens = state.inputs.positions
        x, _ = self.attention_norm.add(stream.sum(self.mixer(stream.whole(x, tokens), state)), x)
        out = self.cross(stream.whole(x, tokens), state, wanted)
        x, _ = self.cross_norm.add(stream.sum(out), stream.pick(x, wanted, tokens))
        x, _ = self.mlp_norm.add(stream.sum(self.mlp(stream.whole(x, out), state.slots_of(wanted))), x)
        return x, None


class SingleLayer(DecoderLayer):
    """One branch: a mixer or an MLP (Mamba-2, Nemotron-H)."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, state: ForwardState, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        stream = self.residual_stream
        tokens = state.inputs.positions
        x, residual = self.attention_norm.add(x, residual)
        x = stream.whole(x, tokens)
        out = self.mixer(x, state, wanted) if self.mlp is None else self.mlp(pick(x, wanted), state.slots_of(wanted))
        return stream.sum(out), stream.pick(residual, wanted, tokens)


class IdleLayer(DecoderLayer):
    """No branch (DeciLM)."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, state: ForwardState, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        stream = self.residual_stream
        tokens = state.inputs.positions
        return stream.pick(x, wanted, tokens), None if residual is None else stream.pick(residual, wanted, tokens)


class SkipLayer(DecoderLayer):
    """Keeps the stream before it for later layers, and blends it with those of earlier layers (Solar)."""

    def __init__(self, builder: Builder, spec: DecoderSpec, index: int, place: LayerPlace) -> None:
        super().__init__(builder, spec, index, place)
        self.index = index
        self.is_source = any(skip.source == index for skip in spec.skips)
        self.skips = [skip for skip in spec.skips if skip.target == index]

    def __call__(
        self, x: Tensor, residual: Tensor | None, state: ForwardState, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        multiply = self.kernels.multiply
        if residual is not None:
            x = self.kernels.add(x, residual, residual)
        if self.is_source:
            state.streams[self.index] = multiply(x, 1.0)  # later layers overwrite x
        for skip in self.skips:
            x = multiply(x, 1 - skip.weight)
            x = self.kernels.add(multiply(state.streams[skip.source], skip.weight), x, x)
        return super().__call__(x, None, state, wanted)


class ShiftedLayer(DecoderLayer):
    """The MLP reads a mix of each token and the previous one, so the mixer computes all tokens (RWKV-7)."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, state: ForwardState, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        stream = self.residual_stream
        tokens = state.inputs.positions
        x, residual = self.attention_norm.add(x, residual)
        out = self.mixer(stream.whole(x, tokens), state)
        x, residual = self.mlp_norm.add(stream.sum(out), residual)
        x = self.mixer.mlp_input(stream.whole(x, tokens), state, wanted)
        return stream.sum(self.mlp(x, state.slots_of(wanted))), stream.pick(residual, wanted, tokens)


class ScaledLayer(DecoderLayer):
    """Ends with a branch that reads the layer's own vector of each token, if the model has these, and with a factor of
    the stream. Routed experts are a branch beside the MLP (Gemma 4)."""

    def __init__(self, builder: Builder, spec: DecoderSpec, index: int, place: LayerPlace) -> None:
        super().__init__(builder, spec, index, place)
        names = spec.names_in(index)
        self.branch = None
        if spec.per_layer is not None:
            self.branch = PerLayerBranch(builder, spec.per_layer, index, spec.hidden_size, spec.norm, names)
        self.experts: ExpertsApart | None = None
        if isinstance(mlp := spec.mlps[index], MoESpec) and mlp.apart:
            self.experts = ExpertsApart(builder, self.mlp, spec.hidden_size, spec.norm, names)
        self.factors = builder.parameter(spec.hidden_size, dtype=torch.float32)
        factor = builder.whole(names["layer_scalar"], 1, dtype=torch.float32)
        builder.when_loaded(lambda: self.factors.copy_(factor.expand_as(self.factors)))  # type: ignore[arg-type]

    def __call__(
        self, x: Tensor, residual: Tensor | None, state: ForwardState, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x, residual = super().__call__(x, residual, state, wanted)
        assert residual is not None
        residual = self.kernels.add(x, residual, residual)
        if self.branch is not None:
            assert state.per_layer is not None
            stream = self.residual_stream
            vectors = stream.pick(state.per_layer, wanted, state.inputs.positions)
            residual = self.kernels.add(self.branch(residual, vectors, None), residual, residual)
        return self.kernels.multiply(residual, self.factors), None

    def _feed_forward(self, x: Tensor, residual: Tensor, tokens: Tensor, slots: Tensor | None) -> Tensor:
        if self.experts is None:
            return super()._feed_forward(x, residual, tokens, slots)
        return self.experts(x, residual, tokens, slots)
