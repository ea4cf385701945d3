"""What the worker needs of a model, whatever its architecture."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.kvcache.specs import AttentionKVSpec
from quire.layers.attention_spec import CacheShape
from quire.layers.forward_state import ForwardState
from quire.ops import Kernels


class Model(Protocol):
    """A model on one rank: token ids -> embeddings -> hidden states -> logits.

    vocab_size: of the logits. num_parameters: of all ranks together. rotary: functions from positions to the tables
    (cos, sin) in ForwardState.rotary. kv_specs: what is kept of a token, one for each KV group; none for a model that
    keeps nothing. cache_shapes: the sizes of what this rank keeps in one layer, one for each KV group, too.
    """

    kernels: Kernels
    vocab_size: int
    num_parameters: int
    rotary: Sequence[Callable[[Tensor], tuple[Tensor, Tensor]]]
    kv_specs: Sequence[AttentionKVSpec]
    cache_shapes: Sequence[CacheShape]

    def bind_cache(self, backends: Sequence[AttentionBackend], memory: Tensor) -> None:
        """Give each group's backend to its layers, and the layer of the group's j-th entry its place in all blocks.

        memory: uint8 [blocks, block_bytes]
        """

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids, positions: [tokens] -> [tokens, hidden]"""

    def forward(
        self, x: Tensor, state: ForwardState, rows: Tensor | None = None, taps: Mapping[int, Tensor] = {}
    ) -> Tensor:
        """x: what `embed` returns -> hidden states that `logits` takes: [tokens, hidden], or only of the tokens `rows`.

        taps: tensors [tokens or more, hidden] by layer. The residual stream behind each of these layers is written to
        the first rows of its tensor, of all tokens of the step.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] -> [rows, vocab_size]"""
