"""Runs a few tokens through a model to find out which attention its layers have, and whether it can run on Quire's.

Nothing is assumed from the names in a config. The model runs with an attention function in which each token attends
only to itself. The function records the queries, keys, values, masks and options of each layer's call. In a second run
with embeddings instead of ids, the last of eight tokens is placed among other tokens, at another index, with its old
position. If its queries, keys and values are the same as before in every layer, they depend only on its embedding and
position, so requests cannot affect each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "quire_probe"  # among transformers' attention functions
_TOKENS = 8
_MOVED = 2  # the last token's new index
_TRIES = 3  # rounding may choose other experts for a token in one of them
_BOUND = 0.1  # relative to a vector's norm: far above rounding, below the effect of another token or a wrong position


@dataclass
class Call:
    """One layer's call of the attention function. q, k, v: [heads or kv_heads, tokens, dim]"""

    module: Any
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sliding_window: int | None
    others: dict[str, Any]


class Recorder:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.has_masks = True

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == value.shape[2]:
            raise ValueError("a layer attends to other tokens than those of its input")
        call = Call(module, query[0], key[0], value[0], attention_mask, sliding_window, others)
        self.calls.append(call)
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None

    def mask(self, mask_function: Callable[..., Tensor], **others: Any) -> Tensor | None:
        """An opaque mask that layers pass on, with the function that defines its content. None without masks."""
        if not self.has_masks:
            return None
        mask = torch.zeros(1, 1, 1, 1)
        mask.function = mask_function  # type: ignore[attr-defined]
        return mask


@dataclass(frozen=True)
class LayerAttention:
    """The observed attention of one layer. head_dim: the larger of the keys' and the values'."""

    module: Any
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


def register() -> Recorder:
    """Return a recorder, registered with transformers as the attention function NAME."""
    recorder = Recorder()
    ALL_ATTENTION_FUNCTIONS.register(NAME, recorder.attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, recorder.mask)
    return recorder


@torch.inference_mode()
def probe(body: Any, vocab_size: int, recorder: Recorder, max_model_len: int) -> list[LayerAttention]:
    """Return the attention of each layer, in order. body: a model without its head, whose attention function is NAME.

    Raises ValueError if it cannot run on Quire's attention.
    """
    draw = torch.Generator().manual_seed(0)
    last = _TOKENS - 1
    seen = list[Call]()
    agrees = False
    ids = torch.empty(0)

    def run(positions: Tensor, **inputs: Tensor) -> tuple[list[Call], Tensor]:
        recorder.calls.clear()
        out = body(position_ids=positions[None].to(body.device), use_cache=False, **inputs)
        return list(recorder.calls), out.last_hidden_state[0]

    for _ in range(_TRIES):
        ids = torch.randint(vocab_size, (2, _TOKENS), generator=draw)
        positions = torch.arange(_TOKENS).expand(2, -1).clone()
        ids[1, _MOVED], positions[1, _MOVED] = ids[0, last], last
        ids = ids.to(body.device)
        seen, hidden = run(positions[0], input_ids=ids[:1])
        others, moved_hidden = run(positions[1], inputs_embeds=body.get_input_embeddings()(ids[1:]))
        pairs = [(hidden[last], moved_hidden[_MOVED])]
        for one, two in zip(seen, others, strict=True):
            pairs += [(a[:, last], b[:, _MOVED]) for a, b in ((one.q, two.q), (one.k, two.k), (one.v, two.v))]
        if agrees := all(_close(a, b) for a, b in pairs):
            break
    if not seen:
        raise ValueError("its layers do not call transformers' attention interface")
    if not agrees:
        raise ValueError("tokens meet outside of attention, or positions are not those that they are given")
    if len({id(call.module) for call in seen}) < len(seen):
        raise ValueError("a layer calls its attention several times")
    layers = [_layer(call, max_model_len) for call in seen]
    recorder.has_masks = False  # as with Quire's attention
    try:
        body(input_ids=ids[:1], use_cache=False)
    except (AttributeError, TypeError) as error:
        raise ValueError("its layers read the attention mask") from error
    return layers


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a.float() - b.float()).norm() <= _BOUND * a.float().norm())


def _layer(call: Call, max_model_len: int) -> LayerAttention:
    """Raises ValueError for attention that Quire does not have."""
    others = call.others
    causal = others.get("is_causal")
    if not (getattr(call.module, "is_causal", True) if causal is None else causal):
        raise ValueError("its tokens also see those behind them")
    for name in ("position_bias", "head_mask"):
        if others.get(name) is not None:
            raise ValueError(f"its attention has a {name}")
    window = call.sliding_window
    if call.mask is not None:
        function = getattr(call.mask, "function", None)
        if function is None:
            raise ValueError("its layers change the attention mask")
        window = _window(function, max_model_len)
    head_dim = max(call.k.shape[-1], call.v.shape[-1])
    short = None if window is None or window >= max_model_len else window
    return LayerAttention(call.module, call.q.shape[0], call.k.shape[0], head_dim, short)


def _window(function: Callable[..., Tensor], length: int) -> int | None:
    """Return how many tokens a query attends to under this mask, including itself; None for all of `length`. function:
    returns for a sequence, a head, a query and keys which keys the query attends to.
    """
    keys = torch.arange(length)
    zero = torch.tensor(0)

    def visible(query: int) -> Tensor:
        return function(zero, zero, torch.tensor(query), keys).expand(length)

    window = int(visible(length - 1).sum())
    for query in (length - 1, length // 2, length // 3, 0):
        expected = (keys <= query) & (keys > query - window)
        if not torch.equal(visible(query), expected):
            raise ValueError("its attention mask is neither causal nor that of a sliding window")
    return None if window == length else window
