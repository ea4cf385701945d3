"""The interface between the worker and a model of any architecture."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from quire.attention.base import CacheBackend
from quire.checkpoints.weights import Parts
from quire.kv.specs import ModelKVSpec, RowsShape, StateShape
from quire.layers.attention_spec import CacheShape
from quire.layers.forward_state import ForwardState
from quire.layers.lora import AdapterSlots
from quire.layers.step_media import StepMedia
from quire.messages.media import EncoderLimits, MediaItem
from quire.models.pooler import Pooler
from quire.ops import Kernels
from quire.parallel.experts import ExpertRanks
from quire.parallel.pipeline import Stage
from quire.parallel.residual_stream import ResidualStream
from quire.sampling.logits_processors import MakeProcessor

if TYPE_CHECKING:
    from quire.checkpoints.packed.cache import WeightCache

Shape = CacheShape | StateShape | RowsShape  # of one rank's cache entry in one layer


class Tower(Protocol):
    """The encoder of a model's media, with the projection of its output."""

    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """tensors: of one item, as preprocessed by quire.multimodal -> [embeds, hidden], or for DeepStack [embeds,
        hidden * (1 + levels)]. If the item's request has an adapter and the model attends to the output by
        cross-attention, the tensor `slots` has the adapter's slot for each embedding, [embeds], int64."""


class Model(Protocol):
    """A model on one rank: token ids -> embeddings -> hidden states -> logits.

    vocab_size: size of the logits. num_token_ids: the largest token id + 1, see Decoder.embed. hidden_size: of the
    residual stream. num_parameters: on all ranks of this stage. rotary: functions from positions to the tables (cos,
    sin) in ForwardState.rotary. kv_specs: what each KV group caches of a token in the layers of this stage; empty for a
    model without a cache. cache_shapes: for each KV group, the sizes of this rank's cache entry in one layer. adapters:
    the slots for low-rank adapters, None if the model does not support adapters. experts: the ranks across which
    experts are distributed, if any. stage: this rank's part of the model in a pipeline. residual_stream: the rank's own
    tokens, for which it computes norms and residual sums. sees: whether it accepts images, and whether tokens have
    several rotary positions (DecoderSpec.has_sections).
    """

    kernels: Kernels
    stage: Stage
    residual_stream: ResidualStream
    vocab_size: int
    num_token_ids: int
    hidden_size: int
    num_parameters: int
    rotary: Sequence[Callable[[Tensor], tuple[Tensor, Tensor]]]
    kv_specs: Sequence[ModelKVSpec]
    cache_shapes: Sequence[Shape]
    adapters: AdapterSlots | None = None
    experts: ExpertRanks | None = None
    sees: tuple[bool, bool] = False, False

    @property
    def input_size(self) -> int:
        """The width of the result of `embed`."""
        return self.hidden_size

    def bind_cache(self, backends: Sequence[CacheBackend], memory: Sequence[Tensor]) -> None:
        """Assign the backend to the layers of each group, and to each layer a view of its own entry in all blocks.

        memory: for each group, uint8 [blocks, bytes]: the part of all blocks in which its entries lie, from the start
        """

    def store_encoded(self, states: Tensor, group: int, blocks: Tensor, slots: Tensor | None = None) -> None:
        """Fill the blocks of a request in a KV group of cross-attention. states: the tower's output, [tokens, hidden];
        blocks: their ids, [blocks], int64; slots: as for `embed`"""
        raise TypeError("the model has no cross-attention")

    def embed(self, ids: Tensor, positions: Tensor, slots: Tensor | None = None) -> Tensor:
        """ids, positions: [tokens] -> [own tokens, input_size]. slots: of the tokens' adapters, None if there
        are none."""

    def embed_with(self, media: StepMedia, ids: Tensor, positions: Tensor, slots: Tensor | None = None) -> Tensor:
        """Like `embed`, for a step with pictures."""
        return media.fill(self.embed(ids, positions, slots))

    def forward(
        self, x: Tensor, state: ForwardState, wanted: Tensor | None = None, taps: Mapping[int, Tensor] = {}
    ) -> Tensor:
        """x: the result of `embed`, or of the previous stage -> hidden states for `logits`: [tokens, hidden], or
        [len(wanted), hidden]; or the stream for the next stage: [own tokens, hidden].

        wanted: indices of the tokens whose hidden states are needed, None for all. taps: tensors [tokens or more,
        hidden] by layer. The residual stream after each of these layers, for all tokens of the step, is written to the
        first rows of its tensor.
        """

    def logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        """hidden: [rows, hidden] -> [rows, vocab_size]. slots: as for `embed`"""


@dataclass(frozen=True)
class MediaEncoder:
    """The encoder of a model's media. tower: only in the first stage. levels: see MediaSpec.

    largest_items: the largest inputs of the tower, on a GPU (quire/multimodal/samples.py). output_rules: creates the
    logits processor of a model with special rules for its output.
    """

    tower: Tower | None = None
    levels: tuple[int, ...] = ()
    largest_items: Callable[[EncoderLimits], Iterator[MediaItem]] | None = None
    output_rules: MakeProcessor | None = None


@dataclass(frozen=True)
class LoadedModel:
    """A rank's part of a model, and what was loaded from the checkpoint beside it.

    encoder: empty for a model without media. poolers: of a pooling model's tasks, in the last stage. parts: the rank's
    parts of the checkpoint's tensors; empty without a checkpoint. weight_cache: stores the packed weights for later
    starts.
    """

    model: Model
    encoder: MediaEncoder = MediaEncoder()
    poolers: Mapping[str, Pooler] = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)
    weight_cache: "WeightCache | None" = None
