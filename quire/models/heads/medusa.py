"""Medusa heads (arXiv:2401.10774): each guesses one later token from the same hidden state of the target model."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.embedding import LMHead
from quire.layers.linear import ColumnParallelLinear
from quire.layers.specs import OutputPart
from quire.models.decoder import Decoder
from quire.models.heads.head import Choose
from quire.models.spec import HfConfig

_MOST = 100  # more heads or layers than there can be


@dataclass(frozen=True)
class _Names:
    """The tensor names of a checkpoint format, without ".weight". {i}: the head; {j}: the layer; {n}: the number of
    layers.

    The prefix is empty, except for converted checkpoints and for target models that contain their heads (Medusa-2).
    """

    prefix: str
    block: str
    matrix: str

    def layer(self, i: int, j: int) -> str:
        return self.prefix + self.block.format(i=i, j=j)


_NAMES = [
    _Names(prefix, block, matrix)
    for prefix in ("", "medusa_heads.", "medusa_head.")
    for block, matrix in (
        ("{i}.{j}.linear", "{i}.{n}"),  # FasterDecoding/medusa-*
        ("blocks.{i}.layers.{j}", "lm_heads.{i}"),  # of vLLM and speculators
    )
]


class TokenMap:
    """The ids of the tokens that the heads can guess, if they cover only a part of the target model's vocabulary."""

    def __init__(self, builder: Builder, has: Callable[[str], bool], size: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        is_offset = has("d2t")  # speculators stores the id minus the index
        self.ids = builder.whole("d2t" if is_offset else "token_map", size, dtype=torch.int64)
        if is_offset:
            builder.when_loaded(lambda: self.ids.add_(torch.arange(size, device=self.ids.device)))  # type: ignore[arg-type]

    def spread(self, logits: Tensor) -> Tensor:
        """[rows, tokens of the map] -> [rows, vocab_size], -inf for all other tokens"""
        return logits.new_full((len(logits), self.vocab_size), -torch.inf).index_copy_(1, self.ids, logits)


class MedusaHeads:
    """A StateHead. Head i consists of one or more layers x + silu(W x + b), and a matrix that computes the logits.

    The first layers of all heads read the same hidden state, so they are one product with stacked weights. matrix:
    computes the logits of all heads, also in one product. If it is None, each head has one of `matrices`.
    """

    def __init__(
        self,
        builder: Builder,
        names: _Names,
        num_heads: int,
        num_layers: int,
        hidden: int,
        bias: bool,
        matrix: Callable[[Tensor], Tensor] | None,
        matrices: Sequence[Callable[[Tensor], Tensor]],
        token_map: TokenMap | None,
        ignored: tuple[str, ...],
    ) -> None:
        self.most = num_heads
        self.ignored = ignored
        self.kernels = builder.kernels
        self.matrix = matrix
        self.matrices = matrices
        self.token_map = token_map

        def linear(heads: Iterable[int], layer: int) -> ColumnParallelLinear:
            parts = [OutputPart(names.layer(i, layer), hidden, 0, hidden) for i in heads]
            return ColumnParallelLinear(builder, hidden, parts, bias)

        self.first = linear(range(num_heads), 0)
        self.later = [[linear([i], layer) for layer in range(1, num_layers)] for i in range(num_heads)]

    def draft(self, hidden: Tensor, ids: Tensor, count: int, choose: Choose) -> Tensor:
        """See StateHead. The heads use neither each other's tokens nor `ids`."""
        states = self.states(hidden, count)
        logits: Iterable[Tensor]
        if self.matrix is None:
            logits = (matrix(x) for matrix, x in zip(self.matrices, states, strict=False))
        else:
            logits = self.matrix(states.flatten(0, 1)).chunk(count)
        if self.token_map is not None:
            logits = map(self.token_map.spread, logits)
        return torch.stack([choose(rows, i) for i, rows in enumerate(logits)], dim=1)

    def states(self, hidden: Tensor, count: int) -> Tensor:
        """[requests, hidden] -> [count, requests, hidden], the inputs of the first heads' matrices"""
        branches = self.kernels.activate(self.first(hidden), name="silu").view(-1, self.most, hidden.shape[1])
        states: Tensor = (branches.transpose(0, 1)[:count] + hidden).contiguous()
        for x, layers in zip(states, self.later, strict=False):
            for layer in layers:
                x += self.kernels.activate(layer(x), name="silu")
        return states


def medusa(
    builder: Builder, config: HfConfig, target: Decoder, has: Callable[[str], bool], max_model_len: int
) -> MedusaHeads:
    """The HeadMaker of every published format.

    The checkpoint's tensors determine the numbers of heads and layers, since published configs have wrong numbers. Only
    for dummy weights, where all or no tensors exist, the config's numbers are used. Heads without a matrix use the
    target model's.
    """
    names = next((n for n in _NAMES if has(f"{n.layer(0, 0)}.weight")), _NAMES[0])
    num_heads = next((i for i in range(_MOST) if not has(f"{names.layer(i, 0)}.weight")), 0)
    num_layers = next((j for j in range(_MOST) if not has(f"{names.layer(0, j)}.weight")), 0)
    num_heads = num_heads or config.get("medusa_num_heads") or config["num_heads"]
    num_layers = num_layers or config.get("medusa_num_layers") or config.get("num_hidden_layers", 1)
    hidden = target.spec.hidden_size

    own = [names.prefix + names.matrix.format(i=i, n=num_layers) for i in range(num_heads)]
    is_shared = bool(config.get("original_lm_head"))  # vLLM: one matrix for all heads, that of the first head
    candidates = [f"{names.prefix}lm_head", own[0]] if is_shared else own[:1]
    found = next((name for name in candidates if has(f"{name}.weight")), None)
    matrix: Callable[[Tensor], Tensor] | None = target.logits if found is None else None
    matrices: list[LMHead] = []
    token_map = None
    if found is not None:
        columns = config.get("truncated_vocab_size") or target.vocab_size
        if columns < target.vocab_size:
            token_map = TokenMap(builder, has, columns, target.vocab_size)
        matrices = [LMHead(builder, name, columns, hidden, None) for name in ([found] if is_shared else own)]
        matrix = matrices[0] if is_shared else None
    ignored = [r"^(token_map|d2t|t2d)$", r"^(medusa_heads\.)?lm_head(s\.\d+)?\.weight$"]
    if names.prefix == "medusa_head.":
        ignored.append(r"^(?!medusa_head\.)")
    bias = has(f"{names.layer(0, 0)}.bias")
    return MedusaHeads(builder, names, num_heads, num_layers, hidden, bias, matrix, matrices, token_map, tuple(ignored))
