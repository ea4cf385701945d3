"""Attention as data: the model's attention, one rank's share of it, and the differences between layers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self

from quire.kv.specs import CacheEntry, EntriesShape, LatentSpec, ModelKVSpec, RowsShape, attention_spec
from quire.layers.specs import NormSpec, OutputPart

if TYPE_CHECKING:
    from quire.parallel.mesh import Communicator


@dataclass(frozen=True)
class CacheShape:
    """The cached data of a token in one layer on one rank. value_dim: see AttentionShape.

    holds_positions: keys contain token positions, which need more than one byte per element (see AlibiSlopes). holders:
    the number of consecutive ranks that cache the same data, each for the same number of query heads. chunk: see
    DecoderSpec.chunks. crossed: see DecoderSpec.crossed. indexer: the indexer of sparse attention. entries:
    set if the cache has compressed entries.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    holds_positions: bool = False
    holders: int = 1
    chunk: int | None = None
    crossed: int = 0
    indexer: "IndexerSpec | None" = None
    entries: EntriesShape | None = None


@dataclass(frozen=True)
class Buckets:
    """How distances between key and query are grouped: all distances in a bucket have the same bias
    (layers/distance_bias.py). count: the number of buckets. reach: the distance from which on all are in the last
    bucket."""

    count: int
    reach: int


@dataclass(frozen=True)
class Temperature:
    """The factor of a query at a position: 1 + scale * log(1 + floor((position + offset) / length)). It keeps attention
    sharp in texts that are longer than the training texts (Llama 4, Ministral 3)."""

    scale: float
    length: int
    offset: int = 0


@dataclass(frozen=True)
class AttentionSpec:
    """The grouped-query attention of a model.

    qkv_layout: q, k and v are three tensors ("separate"), follow each other in the tensor "qkv" ("concatenated"), or
    are ordered by KV head in "qkv": its query heads, its key, its value ("by_kv_head"), or are in four blocks of
    queries, values, keys ("codegen"), or follow the separate gates of results ("gate_first", HRM), or each KV head's
    key and value follow each other in "key_value" ("key_value", TeleChat2). qk_norm: the norm of queries and keys;
    without the name q_norm, that of queries has no weight (Domyn). qk_norm_over: the norm is taken over each head with
    one weight for all heads ("head"), over each head with a separate weight ("heads"), or over all heads as one vector
    ("all"). norm_after_rotary: rotation comes before that norm. qkv_clip: elements of queries, keys and values are
    clamped to at most this magnitude, after the norm (OLMo). temperature: a factor of queries by position. sinks: each
    head has a learned logit in the softmax. alibi: see AlibiSlopes. alibi_unscaled: the factor of the scores does not
    apply to these biases (BLOOM, but not Falcon). transposed: the checkpoint stores [in, out]. input_size: width of the
    vectors from which q, k and v are computed, None for hidden_size. output_gate: each head's result is multiplied by
    the sigmoid of a gate, which follows its query in "q" (Qwen3-Next), or is in the tensor "attention_gate"
    ("separate", AFMoE; or "by_head", one number for each head, LFM3). is_causal: False for encoders, whose tokens also
    see later tokens and are not cached. key_bias: False if keys lack the bias of queries and values (Whisper).
    sub_norm: a norm over all heads' results as one vector, before the output projection (BitNet). buckets: the buckets
    of distances for which each head has a learned bias on its scores (T5). root_reach: the largest distance in the
    table of biases -slope * sqrt(distance); 0 for no such biases (Step 1). value_norm: the norm of each value (Gemma
    4). values_are_keys: values are the keys before their norm and rotation. source: the layer whose cached keys and
    values this layer reads; it has none of its own (Gemma 3n and 4). value_dim: the size of values if it is less than
    head_dim; only for separate or concatenated tensors. value_scale: the factor of values (MiMo-V2). query_rank: the
    rank of the product that computes queries; 0 for none. query_norm: the norm within it (Step 3). looks_ahead:
    whether the tokens of a picture that attend to each other (see MediaSpec) do so in this layer. blends: the layer
    has gates by which its result is blended with that of attention to the keys and values of the layer `blended`; None
    in the first pass through the layers, which has no such result (LoopCoder).
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qkv_layout: Literal["separate", "concatenated", "by_kv_head", "codegen", "gate_first", "key_value"] = "separate"
    qk_norm: NormSpec | None = None
    qk_norm_over: Literal["head", "heads", "all"] = "head"
    norm_after_rotary: bool = False
    qkv_clip: float | None = None
    temperature: Temperature | None = None
    interleaved_rotary: bool = False
    scale: float | None = None  # the factor of the scores; None: head_dim ** -0.5
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    alibi_unscaled: bool = False
    transposed: bool = False
    input_size: int | None = None
    output_gate: bool | Literal["separate", "by_head"] = False
    is_causal: bool = True
    key_bias: bool = True
    sub_norm: NormSpec | None = None
    buckets: Buckets | None = None
    root_reach: int = 0
    value_norm: NormSpec | None = None
    values_are_keys: bool = False
    source: int | None = None
    value_dim: int | None = None
    value_scale: float = 1.0
    query_rank: int = 0
    query_norm: NormSpec | None = None
    looks_ahead: bool = True
    blends: bool = False
    blended: int | None = None

    def cache_shape(self, group: "Communicator") -> CacheShape:
        share = HeadShare.of(self, group)
        dim, (ranks, rest) = self.head_dim + (2 if self.alibi else 0), divmod(group.size, self.num_kv_heads)
        is_even = not rest and self.num_heads % group.size == 0
        return CacheShape(len(share.heads), len(share.kv_heads), dim, None, self.alibi, ranks if is_even else 1)

    def kv_spec(self, layer: int, window: int | None) -> ModelKVSpec:
        return attention_spec([layer], window)


class Heads(Protocol):
    """The heads that a layer divides among ranks."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank. If there are fewer KV heads than ranks, several ranks hold the same KV head.

    If heads cannot be divided evenly, the last ranks have fewer or none. Every rank needs heads, so a rank without any
    becomes a copy: it has the heads of another rank, and its results are not used. holders: the number of ranks,
    without copies, that hold each of the KV heads.
    """

    heads: range
    kv_heads: range
    is_copy: bool
    holders: int

    @classmethod
    def of(cls, spec: Heads, group: "Communicator") -> Self:
        """Return this rank's share: KV heads with all of their query heads, or a part of one KV head's query heads."""
        queries = spec.num_heads // spec.num_kv_heads  # per KV head
        whole, rest = divmod(group.size, spec.num_kv_heads)
        ranks = 1 if rest else whole  # ranks that divide the queries of a KV head
        kv_heads, no_kv_heads = share_of(spec.num_kv_heads, group.rank // ranks, group.size // ranks)
        if ranks == 1:
            heads = range(kv_heads.start * queries, kv_heads.stop * queries)
            return cls(heads, kv_heads, no_kv_heads, 1)
        part, no_part = share_of(queries, group.rank % ranks, ranks)
        first = kv_heads.start * queries
        heads = range(first + part.start, first + part.stop)
        return cls(heads, kv_heads, no_part, -(-queries // -(-queries // ranks)))

    def parts(self, spec: AttentionSpec, names: dict[str, str]) -> list[OutputPart]:
        """Return the parts of the checkpoint's tensors with this rank's query, key and value heads, in that order. If
        results have gates, these follow the queries."""
        heads = spec.num_heads
        kv_heads = spec.num_kv_heads
        q = self.heads
        k = self.kv_heads

        def part(name: str, total: int, first: int, count: int) -> OutputPart:
            dim = spec.value_dim or spec.head_dim if name == "v" else spec.head_dim
            has_bias = name != "attention_gate" and (spec.key_bias or name != "k")
            return OutputPart(names[name], total * dim, first * dim, (first + count) * dim, has_bias)

        v_name = "k" if spec.values_are_keys else "v"
        if spec.source is not None:
            return [part("q", heads, q.start, len(q))]
        if spec.qkv_layout == "gate_first":
            keys = 2 * heads + k.start
            gated = ((heads + q.start, q), (q.start, q), (keys, k), (keys + kv_heads, k))
            return [part("qkv", 2 * (heads + kv_heads), start, len(r)) for start, r in gated]
        if spec.output_gate == "separate":
            wide = (("q", heads, q), ("attention_gate", heads, q), ("k", kv_heads, k), (v_name, kv_heads, k))
            return [part(key, total, r.start, len(r)) for key, total, r in wide]
        if spec.output_gate is True:
            queries, gates = ([part("q", 2 * heads, 2 * h + which, 1) for h in q] for which in (0, 1))
            return [*queries, *gates, *(part(key, kv_heads, k.start, len(k)) for key in ("k", "v"))]
        if spec.qkv_layout != "separate":
            return self._joined_parts(spec, names)
        shares = (("q", heads, q), ("k", kv_heads, k), (v_name, kv_heads, k))
        gates = []
        if spec.output_gate == "by_head":
            gates = [OutputPart(names["attention_gate"], heads, q.start, q.stop, has_bias=False)]
        whole = [part(key, total, r.start, len(r)) for key, total, r in shares]
        if spec.query_rank:
            whole[0] = OutputPart(names["q"], spec.query_rank, 0, spec.query_rank)
        return [*whole, *gates]

    def _joined_parts(self, spec: AttentionSpec, names: dict[str, str]) -> list[OutputPart]:
        """Return the result of `parts` for layouts in which a tensor has several of queries, keys and values."""
        heads = spec.num_heads
        kv_heads = spec.num_kv_heads
        dim = spec.head_dim
        q = self.heads
        k = self.kv_heads

        def part(name: str, total: int, first: int, count: int = 1) -> OutputPart:
            return OutputPart(names[name], total * dim, first * dim, (first + count) * dim)

        if spec.qkv_layout == "key_value":
            pairs = [part("key_value", 2 * kv_heads, 2 * h + which) for which in (0, 1) for h in k]
            return [part("q", heads, q.start, len(q)), *pairs]
        if spec.qkv_layout == "concatenated":
            value_dim = spec.value_dim or dim
            keys = heads * dim
            values = keys + kv_heads * dim
            rows = values + kv_heads * value_dim
            shares = ((0, q, dim), (keys, k, dim), (values, k, value_dim))
            return [OutputPart(names["qkv"], rows, at + r.start * d, at + r.stop * d) for at, r, d in shares]
        total = heads + 2 * kv_heads
        if spec.qkv_layout == "codegen":
            block = heads // 4
            return [part("qkv", total, (h // block * 3 + at) * block + h % block) for at in (0, 2, 1) for h in q]
        group = heads // kv_heads
        queries = [part("qkv", total, h // group * (group + 2) + h % group) for h in q]
        return queries + [part("qkv", total, h * (group + 2) + group + which) for which in (0, 1) for h in k]


@dataclass(frozen=True)
class BlockAttentionSpec:
    """Attention to blocks of the text (layers/block_attention.py). index_dim: the size of the indexer's keys.
    block_size: the tokens of a block. top_blocks: the blocks that each KV head of a token selects, including the last
    local_blocks."""

    attention: AttentionSpec
    index_dim: int
    block_size: int
    top_blocks: int
    local_blocks: int

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    def cache_shape(self, group: "Communicator") -> RowsShape:
        kv_heads = len(HeadShare.of(self, group).kv_heads)
        return RowsShape(2 * kv_heads * self.attention.head_dim + self.index_dim, kv_heads)

    def kv_spec(self, layer: int, window: int | None) -> ModelKVSpec:
        return attention_spec([layer])


@dataclass(frozen=True)
class IndexerSpec:
    """The indexer of sparse attention (see layers/indexer.py). top_k: the number of tokens that a query attends to.
    rotates_last: the last elements of queries and keys are rotated, not the first (Hunyuan 4). eps: of the norm of
    keys. pool: the number of tokens that are selected together; 0 if each token is selected separately (see
    layers/pooling_indexer.py)."""

    num_heads: int
    head_dim: int
    top_k: int
    interleaved_rotary: bool = False
    rotates_last: bool = False
    eps: float = 1e-6
    pool: int = 0


@dataclass(frozen=True)
class LatentAttentionSpec:
    """The multi-head latent attention of a model.

    q_rank: None if queries are not compressed. nope_dim, rope_dim: elements of a query without and with rotation.
    indexer: the indexer of sparse attention, None if a query attends to all tokens. shares_selection: the layer has no
    indexer, and attends to the tokens that the previous layer selected (GLM-5, arXiv:2603.12201). temperature: a factor
    of queries by position (Mistral 4). sinks, output_gate: see AttentionSpec; the gate is in "attention_gate" (Hunyuan
    4; Ling 3's is by head). q_norm: the norm of compressed queries, if it is not `norm`. rope_norm: the norm of rotated
    keys (dots3).
    """

    hidden_size: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm: NormSpec
    scale: float
    bias: bool = False
    interleaved_rotary: bool = True
    indexer: IndexerSpec | None = None
    shares_selection: bool = False
    temperature: Temperature | None = None
    sinks: bool = False
    output_gate: bool | Literal["by_head"] = False
    q_norm: NormSpec | None = None
    rope_norm: NormSpec | None = None

    def heads(self, group: "Communicator") -> tuple[range, bool]:
        """This rank's heads, and whether they are a copy (see HeadShare)."""
        return share_of(self.num_heads, group.rank, group.size)

    def cache_shape(self, group: "Communicator") -> CacheShape:
        holders = 1 if self.num_heads % group.size else group.size
        return CacheShape(
            len(self.heads(group)[0]),
            1,
            self.kv_rank + self.rope_dim,
            self.kv_rank,
            holders=holders,
            indexer=self.indexer,
        )

    @property
    def selects(self) -> bool:
        """Whether the layer itself has an indexer."""
        return self.indexer is not None and not self.shares_selection

    def kv_spec(self, layer: int, window: int | None) -> ModelKVSpec:
        return LatentSpec(tuple(CacheEntry(layer, role) for role in ("kv", "indexer")[: 1 + self.selects]))


def share_of(total: int, rank: int, size: int) -> tuple[range, bool]:
    """Return a rank's part of `total` items. Parts are equal, but the last ones may be short. A rank that would have no
    items gets a copy of the last part."""
    part = -(-total // size)
    last = -(-total // part) - 1
    start = min(rank, last) * part
    return range(start, min(start + part, total)), rank > last


@dataclass(frozen=True)
class LayerPlace:
    """The properties of attention that differ between layers.

    window: number of tokens that a query sees, None for all. rotary: index of the layer's tables in
    ForwardState.rotary, None for a layer without rotary embedding. scale: the layer's own factor for the scores.
    state_group, cross_group, entries_group, inputs_group: the KV groups of its state, of its cross-attention, and of
    its compressed entries and their inputs, if it has them. blended_group: that of AttentionSpec.blended.
    """

    kv_group: int
    window: int | None = None
    rotary: int | None = 0
    scale: float = 1.0
    state_group: int = 0
    cross_group: int = 0
    entries_group: int = 0
    inputs_group: int = 0
    blended_group: int | None = None
