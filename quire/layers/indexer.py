"""The lightning indexer (DeepSeek-V3.2, arXiv:2512.02556, section 2.1), which selects the tokens of sparse attention.

It is a small, separate attention. A token has one key and several queries, which give a score for each pair of tokens:

    score(t, s) = sum over heads j of weight(t, j) * max(0, q(t, j) . k(s))

The published kernels compute it in FP8, after a rotation by a Hadamard matrix, which reduces rounding errors and
preserves the products. Here scores are products in the model's type with sums in float32, without a rotation. The
selection needs complete scores, so every rank of a tensor group computes all heads, and all ranks select the same
tokens.
"""

from typing import Any

from torch import Tensor

from quire.attention.sparse import SelectingAttention
from quire.layers.attention_spec import IndexerSpec
from quire.layers.build import Builder
from quire.layers.linear import ReplicatedLinear
from quire.layers.norm import make_norm
from quire.layers.specs import NormSpec


class Indexer:
    """The indexer of one layer. names: the names of index_q, index_k, index_k_norm and index_weights."""

    def __init__(self, builder: Builder, spec: IndexerSpec, names: dict[str, str], hidden: int, q_rank: int) -> None:
        self.spec = spec
        self.rotary_embedding = builder.kernels.rotary_embedding
        self.join = builder.kernels.join
        heads = spec.num_heads
        dim = spec.head_dim
        self.q = ReplicatedLinear(builder, names["index_q"], q_rank, heads * dim)
        self.k = ReplicatedLinear(builder, names["index_k"], hidden, dim)
        self.k_norm = make_norm(builder, names["index_k_norm"], dim, NormSpec("layer", spec.eps, bias=True))
        self.weights = ReplicatedLinear(builder, names["index_weights"], hidden, heads)

    def bind(self, backend: SelectingAttention, cache: Tensor) -> None:
        """cache: the layer's entry for the indexer's keys."""
        self.cache = cache

    def select(
        self,
        x: Tensor,
        compressed: Tensor,
        slots: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        backend: SelectingAttention,
        plan: Any,
    ) -> None:
        """Select the tokens to which the step's tokens attend. x: [tokens, hidden]; compressed: the compressed queries
        of the attention, [tokens, q_rank]; slots: the slots of the tokens' adapters."""
        assert rotary is not None, "an indexer rotates its keys"
        q = self.q(compressed, slots).view(len(x), self.spec.num_heads, self.spec.head_dim)
        k = self.k_norm(self.k(x, slots))[:, None]
        if self.spec.rotates_last:  # put them first: the order of elements does not change the products
            rest = self.spec.head_dim - 2 * rotary[0].shape[-1]
            q, k = (self.join(part[..., rest:], part[..., :rest]) for part in (q, k))
        q, k = self.rotary_embedding(q, k, *rotary, self.spec.interleaved_rotary)
        backend.select_from(self.cache, q, self.weights(x, slots), k, plan)
