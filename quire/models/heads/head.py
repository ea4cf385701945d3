"""The interfaces of drafters' heads: small networks that guess tokens from the hidden states of the target model."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from quire.attention.base import CacheBackend
from quire.kv.specs import ModelKVSpec
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState
from quire.models.decoder import Decoder
from quire.models.model import Shape
from quire.models.spec import HfConfig

Choose = Callable[[Tensor, int], Tensor]  # (logits [requests, vocab_size], number of the draft, from 0) -> [requests]


class ChainHead(Protocol):
    """Guesses tokens one after the other, with its own KV cache (EAGLE, multi-token prediction).

    Its input at position i is the token at position i + 1 together with the hidden state of position i. Its output at
    position i is the hidden state from which the token at position i + 2 is guessed. It replaces the target model's
    hidden state at position i + 1.

    taps: the layers of the target model after which it reads the residual stream, in the order that `combine` expects;
    empty if it reads the final hidden states instead. token_ids: the target model's ids of the columns of the logits,
    int64; None if they are the same. mask: for a head that guesses all drafts in one forward (P-EAGLE), the token id
    and the hidden state [hidden] that stand for unknown tokens; else None. rotary, kv_specs, cache_shapes, bind_cache:
    see Model. ignored: patterns of tensors in its checkpoint that it does not need.
    """

    taps: Sequence[int]
    token_ids: Tensor | None
    mask: tuple[int, Tensor] | None
    ignored: tuple[str, ...]
    rotary: Sequence[Callable[[Tensor], tuple[Tensor, Tensor]]]
    kv_specs: Sequence[ModelKVSpec]
    cache_shapes: Sequence[Shape]

    def bind_cache(self, backends: Sequence[CacheBackend], memory: Sequence[Tensor]) -> None: ...

    def combine(self, states: Sequence[Tensor]) -> Tensor:
        """states: the final hidden states, or those of `taps`, each [tokens, hidden] -> the head's hidden states,
        [tokens, hidden]"""

    def embed(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """ids: [tokens], hidden: [tokens, hidden] -> the input of `forward`, [tokens, any width]"""

    def forward(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        """-> hidden states [tokens, hidden], or [len(wanted), hidden] of the tokens with these indices"""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: results of `forward`, [rows, hidden] -> [rows, columns]"""


@runtime_checkable
class StateHead(Protocol):
    """Guesses tokens from one hidden state of the target model, without a cache (Medusa, MLP speculator).

    most: the largest number of drafts. ignored: see ChainHead.
    """

    most: int
    ignored: tuple[str, ...]

    def draft(self, hidden: Tensor, ids: Tensor, count: int, choose: Choose) -> Tensor:
        """hidden: [requests, hidden], the final hidden state from which `ids` [requests], the newest tokens of their
        texts, were sampled -> `count` drafts for each request, [requests, count], int64, chosen by `choose`."""


# (builder, config of the head's checkpoint, target model, function: whether a tensor exists, max_model_len) -> head
HeadMaker = Callable[[Builder, HfConfig, Decoder, Callable[[str], bool], int], ChainHead | StateHead]
