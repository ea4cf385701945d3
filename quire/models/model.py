"""The interface between the worker and a model of any architecture."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from quire.attention.base import CacheBackend
from quire.checkpoints.weights import Parts
from quire.kv.specs import ModelKVSpec, StateShape
from quire.layers.attention_spec import CacheShape
from quire.layers.forward_state import ForwardState
from quire.layers.lora import AdapterSlots
from quire.messages.media import EncoderLimits, MediaItem
from quire.models.pooler import Pooler
from quire.ops import Kernels
from quire.parallel.experts import ExpertRanks
from quire.parallel.pipeline import Stage
from quire.parallel.residual_stream import ResidualStream
from quire.sampling.logits_processors import MakeProcessor

Shape = CacheShape | StateShape  # what one rank caches in one layer


class Tower(Protocol):
    """The encoder of a model that sees, with what projects its results."""

    def __call__(self, modality: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """tensors: of one item, as the preprocessing of quire.multimodal makes them -> [embeds, hidden], or for
        DeepStack [embeds, hidden * (1 + levels)]. If the item's request has an adapter, and the model reads the results
        by cross-attention, `slots` among them is the adapter's slot for each of these, [embeds], int64."""


class Model(Protocol):
    """A model on one rank: token ids -> embeddings -> hidden states -> logits.

    vocab_size: size of the logits. num_token_ids: one more than the largest token id, see Decoder.embed. hidden_size:
    of the residual stream. num_parameters: of all ranks of this stage. rotary: functions from positions to the tables
    (cos, sin) in ForwardState.rotary. kv_specs: what each KV group caches of a token in the layers of this stage; empty
    for a model without a cache. cache_shapes: for each KV group, the sizes of what this rank caches in one layer.
    pooler: of a model that pools. adapters: the slots for low-rank adapters, None if the model takes none. experts: the
    ranks to which experts are dealt, if they are. stage: the part of the model that this rank has in a pipeline.
    residual_stream: which tokens are the rank's own, whose norms and residual sums it computes. parts: what the rank
    has of which tensors of the checkpoint; nothing, if there was none. sees: whether it takes pictures, and whether
    tokens have several rotary positions (DecoderSpec.has_sections). tower: in the first stage. largest_items: what the
    tower may have to encode, on a GPU (quire/multimodal/samples.py). output_rules: makes the logits processor of a
    model whose output has rules of its own. weight_cache: where the packed weights are kept for later starts.
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
    pooler: Pooler | None
    adapters: AdapterSlots | None = None
    experts: ExpertRanks | None = None
    parts: Parts = {}  # noqa: RUF012
    sees: tuple[bool, bool] = False, False
    tower: Tower | None = None
    largest_items: Callable[[EncoderLimits], Iterator[MediaItem]] | None = None
    output_rules: MakeProcessor | None = None
    weight_cache: Any = None

    def bind_cache(self, backends: Sequence[CacheBackend], memory: Sequence[Tensor]) -> None:
        """Give the layers of each group their backend, and each layer a view of its own entry in all blocks.

        memory: for each group, uint8 [blocks, bytes]: the part of all blocks in which its entries lie, from the start
        """

    def store_encoded(self, states: Tensor, group: int, blocks: Tensor, slots: Tensor | None = None) -> None:
        """Fill the blocks of a request in a KV group of cross-attention. states: the tower's result, [tokens, hidden];
        blocks: their ids, [blocks], int64; slots: as for `embed`"""
        raise TypeError("the model has no cross-attention")

    def embed(self, ids: Tensor, positions: Tensor, slots: Tensor | None = None) -> Tensor:
        """ids, positions: [tokens] -> [own tokens, hidden]. slots: of the tokens' adapters, None if there are none."""

    def forward(
        self, x: Tensor, state: ForwardState, wanted: Tensor | None = None, taps: Mapping[int, Tensor] = {}
    ) -> Tensor:
        """x: the result of `embed`, or of the stage before -> hidden states for `logits`: [tokens, hidden], or
        [len(wanted), hidden]; or the stream for the next stage: [own tokens, hidden].

        wanted: indices of the tokens whose hidden states are needed, None for all. taps: tensors [tokens or more,
        hidden] by layer. The residual stream after each of these layers, for all tokens of the step, is written to the
        first rows of its tensor.
        """

    def logits(self, hidden: Tensor, slots: Tensor | None = None) -> Tensor:
        """hidden: [rows, hidden] -> [rows, vocab_size]. slots: as for `embed`"""
