"""The memory of a DecoderSpec's parameters and KV cache, without building the model: for the whole model or for a
rank's share."""

from dataclasses import dataclass, replace

from quire.kv.specs import RowsShape, StateShape
from quire.layers.attention_spec import LatentAttentionSpec
from quire.models.parameters import WHOLE, Parameters, Share
from quire.models.parameters import parameters_of as parameters_of
from quire.models.spec import DecoderSpec

FULL, HALF = 4, 2  # bytes per parameter in float32 and bfloat16
_QUANTIZED = {"int8": 1.0, "int4": 0.5 + 4 / 128}  # with --quantization; in int4, groups of 128 have a scale in float32


@dataclass(frozen=True)
class Footprint:
    """The memory of a model.

    linear, table, head: bytes per parameter in the checkpoint, for linear layers, the embedding table and the output
    layer. element_bytes: bytes per element of the KV cache. is_dense: whether --quantization can shrink the weights.
    generates: False for a model that computes embeddings or scores. share: the rank's share of the model.
    """

    spec: DecoderSpec
    parameters: Parameters
    linear: float
    table: float
    head: float
    is_dense: bool = False
    element_bytes: int = HALF
    generates: bool = True
    share: Share = WHOLE

    def of(self, share: Share) -> "Footprint":
        """Return the footprint of a rank with this share."""
        return replace(self, parameters=parameters_of(self.spec, share), share=share)

    @property
    def layers(self) -> range:
        return range(self.spec.num_layers) if self.share.layers is None else self.share.layers

    @property
    def quantizations(self) -> list[str | None]:
        """Return the values of --quantization that the model supports. None means unchanged weights."""
        return [None, *_QUANTIZED] if self.is_dense and self.generates else [None]

    def weights(self, quantization: str | None) -> tuple[float, float]:
        """Return the bytes of all weights in memory, and of those that are read for each token."""
        p, (linear, table, head) = self.parameters, self.bytes_of_a_parameter(quantization)
        tables = table * p.embedding
        output = table * p.embedding if p.tied else head * p.head
        return linear * (p.experts + p.rest) + tables + head * p.head, linear * (p.chosen + p.rest) + output

    def bytes_of_a_parameter(self, quantization: str | None) -> tuple[float, float, float]:
        """Return the bytes per parameter in memory for linear layers, the table and the head."""
        if quantization is None:
            return self.linear, self.table, self.head
        head = _QUANTIZED["int8"]
        return _QUANTIZED[quantization], head if self.parameters.tied else self.table, head

    def entry(self, layer: int) -> int:
        """Return the bytes that a layer caches per token."""
        total = 0
        for part in self.spec.cached_in(layer):
            shape = part.cache_shape(self.share.group)
            if isinstance(shape, RowsShape):
                total += shape.size * self.element_bytes
            elif not isinstance(shape, StateShape):
                vectors = 2 if shape.value_dim is None else 1  # keys and values, or one latent
                total += vectors * shape.num_kv_heads * shape.head_dim * self.element_bytes
            if isinstance(part, LatentAttentionSpec) and part.indexer is not None:
                total += part.selects * part.indexer.head_dim * self.element_bytes
        return total

    def state(self, layer: int) -> int:
        """Return the bytes of the state that a layer caches per request, regardless of its length."""
        shapes = (part.cache_shape(self.share.group) for part in self.spec.cached_in(layer))
        return sum(FULL * shape.page_numbers(drafts=0) for shape in shapes if isinstance(shape, StateShape))

    def cache(self, num_tokens: int) -> int:
        """Return the bytes of the KV cache for one request of `num_tokens` tokens. A layer with a window keeps at most
        the window, and a recurrent layer one state."""
        if self.spec.is_encoder:
            return 0
        windows = ((layer, self.spec.windows[layer]) for layer in self.layers)
        return sum(
            self.entry(i) * (num_tokens if window is None else min(window, num_tokens)) + self.state(i)
            for i, window in windows
        )
