"""Counts the parameters of a DecoderSpec without building the model: all of them, or those of one rank."""

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from quire.layers.attention_spec import AttentionSpec, BlockAttentionSpec, HeadShare, LatentAttentionSpec
from quire.layers.compressed_spec import CompressedAttentionSpec, CompressedEntriesSpec, CompressorInputsSpec
from quire.layers.specs import HyperSpec, MLPSpec, MoESpec, NormSpec
from quire.layers.state_spec import (
    DeltaSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    RwkvSpec,
    SharedBlockSpec,
    ShortConvSpec,
)
from quire.models.spec import CachedSpec, DecoderSpec, Names


@dataclass(frozen=True)
class Share:
    """A rank's share of a model: by default, all of it.

    tp: number of ranks that divide each layer. The share is the first rank's, which is the largest. layers: None for
    all. expert_ranks: number of ranks across which whole experts are distributed; 1 if experts are divided like the
    other layers.
    """

    tp: int = 1
    layers: range | None = None
    has_embedding: bool = True
    has_head: bool = True
    expert_ranks: int = 1

    @property
    def group(self) -> Any:
        """The part of a Communicator on which the shape of a layer depends."""
        return SimpleNamespace(rank=0, size=self.tp)

    def part(self, size: int) -> int:
        return -(-size // self.tp)


WHOLE = Share()


@dataclass(frozen=True)
class Parameters:
    """The numbers of a model's parameters.

    embedding: the table of token vectors. A token reads one row of it, or all rows if it is also the output layer
    (tied). head: a separate output layer. experts: the parameters of all experts. chosen: those of the experts that one
    token uses. rest: all others, which every token uses.
    """

    embedding: int
    tied: bool
    head: int
    experts: int
    chosen: int
    rest: int

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.experts + self.rest

    @property
    def active(self) -> int:
        """The number of parameters that one token uses."""
        return self.total - self.experts + self.chosen

    @property
    def output(self) -> int:
        """The number of parameters of the output layer, tied or not."""
        return self.embedding if self.tied else self.head


def parameters_of(spec: DecoderSpec, share: Share = WHOLE) -> Parameters:
    """chosen: if experts are distributed across ranks, the average that a token uses on one rank."""
    hidden = spec.hidden_size
    width = spec.embedding_size or spec.hidden_size
    table = share.part(spec.vocab_size) * width
    has_head = spec.names.get("lm_head") is not None and share.has_head
    is_tied = bool(spec.tie_embeddings) and has_head
    rest = share.part(spec.vocab_size) if spec.lm_head_bias and has_head else 0
    rest += _norms(
        spec,
        spec.names,
        (*(("embedding_norm",) if share.has_embedding else ()), *(("final_norm",) if share.has_head else ())),
    )
    if share.has_embedding:
        rest += spec.token_types * hidden
        if spec.position_offset is not None:
            rest += (spec.max_positions + spec.position_offset) * hidden
    if (own := spec.per_layer) is not None and share.has_embedding:
        vectors = spec.num_layers * own.size
        rest += share.part(own.vocab_size) * vectors + hidden * vectors + own.size
    if spec.altup is not None and share.has_embedding:
        rest += 2 * (spec.altup.streams - 1) * hidden * hidden
    if spec.cycles is not None:
        rest += hidden
    if spec.hyper is not None and share.has_head and spec.names.get("hyper_head") is not None:
        rest += _hyper(spec.hyper, hidden, 1)
    if width != hidden:
        rest += (share.has_embedding + share.has_head) * width * hidden
    experts = chosen = 0
    layers = range(spec.num_layers) if share.layers is None else share.layers
    for index in layers:
        if spec.first_use(index, layers) < index:
            continue
        of_experts, of_chosen, others = _layer(spec, index, share)
        experts = experts + of_experts
        chosen = chosen + of_chosen
        rest = rest + others
    embedding = table if share.has_embedding or is_tied else 0
    head = table if has_head and not is_tied else 0
    return Parameters(embedding, is_tied, head, experts, chosen, rest)


def _layer(spec: DecoderSpec, index: int, share: Share) -> tuple[int, int, int]:
    """Return the numbers of parameters of all experts of a layer, of the experts that a token uses, and of the rest."""
    mlp = spec.mlps[index]
    if isinstance(mixer := spec.mixers[index], SharedBlockSpec):
        return 0, 0, _with_block(spec, index, mixer, share)
    before = ("attention_norm",) if index or spec.first_norm else ()
    rest = _norms(spec, spec.names_in(index), (*before, "attention_post_norm", "mlp_norm", "mlp_post_norm"))
    rest += 1 if spec.residual == "scaled" else 0
    if (own := spec.per_layer) is not None:
        rest += 2 * spec.hidden_size * own.size + spec.hidden_size
    if (altup := spec.altup) is not None:
        count = altup.streams
        rest += count * count * (count + 1) + spec.hidden_size * (count + 2 + 2 * altup.laurel_rank + 1)
    if (hyper := spec.hyper) is not None:
        rest += 2 * _hyper(hyper, spec.hidden_size, 2, hyper.balances > 0)
    for part in spec.parts_in(index):
        rest += _mixer(part, share)
        if isinstance(part, MambaSpec) and spec.names.get("dt_norm") is not None:  # with the norms of B and C
            rest += _norm(part.norm, part.rank + 2 * part.key_dim)
    if not isinstance(mlp, MoESpec):
        return 0, 0, rest + (0 if mlp is None else _mlp(mlp, spec.hidden_size, share))
    rest += _router(mlp, spec.hidden_size, share)
    if mlp.apart:
        rest += 3 * _norm(spec.norm, spec.hidden_size) + spec.hidden_size + mlp.num_experts
    single = MLPSpec(mlp.intermediate_size, gated=mlp.gated, bias=mlp.bias)
    width = mlp.latent_size or spec.hidden_size
    rest += 2 * mlp.latent_size * spec.hidden_size
    if share.expert_ranks == 1:
        expert = _mlp(single, width, share)
        return mlp.num_experts * expert, mlp.top_k * expert, rest
    expert = _mlp(single, width, WHOLE)
    return -(-mlp.num_experts // share.expert_ranks) * expert, mlp.top_k * expert // share.expert_ranks, rest


def _with_block(spec: DecoderSpec, index: int, mixer: SharedBlockSpec, share: Share) -> int:
    """Count the parameters of a layer, and those of its shared block if it is the first that uses it."""
    hidden = spec.hidden_size
    heads = HeadShare.of(mixer.attention, share.group)
    outputs = (len(heads.heads) + 2 * len(heads.kv_heads)) * mixer.attention.head_dim
    total = _norm(spec.norm, hidden) + _recurrent(mixer.recurrent, share) + hidden * hidden
    total += mixer.attention_rank * (6 * hidden + outputs)
    total += mixer.mlp_rank * (hidden + 2 * share.part(mixer.mlp.intermediate_size))
    layers = range(spec.num_layers) if share.layers is None else share.layers
    users = [i for i in layers if isinstance(spec.mixers[i], SharedBlockSpec)]
    if index == next(i for i in users if spec.names_in(i)["q"] == spec.names_in(index)["q"]):
        total += 3 * _norm(spec.norm, hidden) + _attention(mixer.attention, share) + _mlp(mixer.mlp, hidden, share)
    return total


def _hyper(hyper: HyperSpec, hidden: int, kinds: int, mixes: bool = False) -> int:
    inputs = hyper.streams * hidden + 1
    return kinds * (hyper.streams * inputs + 1) + mixes * (hyper.streams**2 * inputs + 1)


def _norm(norm: NormSpec, size: int) -> int:
    return size * (2 if norm.bias else 1) if norm.affine else 0


def _norms(spec: DecoderSpec, names: Names, roles: Iterable[str]) -> int:
    return sum(_norm(spec.norm_of(role), spec.hidden_size) for role in roles if names.get(role) is not None)


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return (inputs + bias) * outputs


def _mixer(mixer: CachedSpec, share: Share) -> int:
    if isinstance(mixer, RecurrentSpec):
        return _recurrent(mixer, share)
    if isinstance(mixer, CompressedAttentionSpec):
        return _compressed_attention(mixer, share)
    if isinstance(mixer, BlockAttentionSpec):
        kv_heads = len(HeadShare.of(mixer, share.group).kv_heads)
        size = mixer.index_dim
        index = (kv_heads + 1) * size * mixer.attention.hidden_size + 2 * size
        return _attention(mixer.attention, share) + index
    if isinstance(mixer, CompressedEntriesSpec | CompressorInputsSpec):
        return 0  # counted with the attention
    return _attention(mixer, share) if isinstance(mixer, AttentionSpec) else _latent_attention(mixer, share)


def _recurrent(mixer: RecurrentSpec, share: Share) -> int:
    hidden = mixer.hidden_size
    shape = mixer.cache_shape(share.group)
    heads = shape.heads
    channels = shape.channels
    values = shape.heads * shape.value_dim
    if isinstance(mixer, MambaSpec):
        selected = mixer.rank + 2 * mixer.key_dim
        total = _linear(hidden, 2 * channels, mixer.bias) + channels * (selected + mixer.rank + hidden)
        return total + channels * (mixer.conv_width + mixer.conv_bias + mixer.key_dim + 2) + hidden * mixer.bias
    if isinstance(mixer, Mamba2Spec):
        total = _linear(hidden, values + channels + heads, mixer.bias) + values * hidden + hidden * mixer.bias
        return total + channels * (mixer.conv_width + mixer.conv_bias) + 3 * heads + values * mixer.has_norm
    if isinstance(mixer, RwkvSpec):  # seven mixes with the previous token are whole on every rank
        ranks = (mixer.decay_rank, mixer.rate_rank, mixer.gate_rank, mixer.value_rank)
        low = sum(_linear(rank, values, True) + hidden * rank for rank in ranks if rank) - values  # no bias of gates
        return 4 * hidden * values + 7 * hidden + 5 * values + low
    if isinstance(mixer, ShortConvSpec):
        return (
            _linear(hidden, 3 * channels, mixer.bias)
            + channels * (mixer.conv_width + mixer.bias + hidden)
            + (hidden * mixer.bias)
        )
    if isinstance(mixer, LightningSpec):  # queries, keys, values, gates and results, and three norms
        norms = values + 2 * mixer.key_dim * mixer.qk_norm
        return 5 * hidden * values + 3 * values * mixer.bias + norms
    assert isinstance(mixer, DeltaSpec)
    total = channels * mixer.conv_width + heads * (1 + mixer.decays) + mixer.value_dim + values * hidden
    if mixer.projections == "kimi_whole":
        return total + hidden * (channels + 2 * values + heads)
    if mixer.projections == "kimi":
        return total + hidden * (channels + heads) + 2 * (hidden + values) * mixer.value_dim
    return total + hidden * (channels + values + 2 * heads)


def _attention(mixer: AttentionSpec, share: Share) -> int:
    mine = HeadShare.of(mixer, share.group)
    dim = mixer.head_dim
    heads = len(mine.heads)
    kv_heads = len(mine.kv_heads)
    value_dim = mixer.value_dim or dim
    gates = heads if mixer.output_gate == "by_head" else heads * dim
    outputs = (mixer.query_rank or heads * dim) + (gates if mixer.output_gate else 0)
    if mixer.source is None:
        outputs += kv_heads * (dim if mixer.values_are_keys else dim + value_dim)
    total = _linear(mixer.input_size or mixer.hidden_size, outputs, mixer.qkv_bias)
    total += heads * value_dim * mixer.hidden_size + mixer.hidden_size * mixer.output_bias
    total += mixer.query_rank * heads * dim
    if mixer.query_norm is not None:
        total += _norm(mixer.query_norm, mixer.query_rank)
    if mixer.sub_norm is not None:
        total += _norm(mixer.sub_norm, heads * dim)
    if mixer.qk_norm is not None:
        both = 2 if mixer.source is None else 1
        total += _norm(mixer.qk_norm, dim * (both if mixer.qk_norm_over == "head" else heads + kv_heads))
    total += heads * (dim + 1) * mixer.blends
    return total + (heads if mixer.sinks else 0)


def _latent_attention(mixer: LatentAttentionSpec, share: Share) -> int:
    heads = len(mixer.heads(share.group)[0])
    queries = heads * (mixer.nope_dim + mixer.rope_dim)
    if mixer.q_rank is None:
        total = mixer.hidden_size * queries
    else:
        total = _linear(mixer.hidden_size, mixer.q_rank, mixer.bias) + mixer.q_rank * queries
        total += _norm(mixer.norm, mixer.q_rank)
    total += _linear(mixer.hidden_size, mixer.kv_rank + mixer.rope_dim, mixer.bias) + _norm(mixer.norm, mixer.kv_rank)
    total += mixer.kv_rank * heads * (mixer.nope_dim + mixer.value_dim)
    if mixer.selects and mixer.indexer is not None and mixer.q_rank is not None:  # whole on every rank
        of_index = mixer.indexer
        dim = mixer.indexer.head_dim
        total += of_index.num_heads * (mixer.q_rank * dim + mixer.hidden_size) + (mixer.hidden_size + 2) * dim
        total += (of_index.pool and of_index.pool + mixer.hidden_size) * dim
    gates = heads * (1 if mixer.output_gate == "by_head" else mixer.value_dim if mixer.output_gate else 0)
    total += (heads * mixer.value_dim + gates) * mixer.hidden_size
    if mixer.rope_norm is not None:
        total += _norm(mixer.rope_norm, mixer.rope_dim)
    return total + mixer.hidden_size * mixer.bias + (heads if mixer.sinks else 0)


def _compressed_attention(mixer: CompressedAttentionSpec, share: Share) -> int:
    heads = len(mixer.heads(share.group)[0])
    hidden = mixer.hidden_size
    dim = mixer.head_dim
    total = hidden * (mixer.q_rank + dim) + mixer.q_rank * (heads * dim + 1) + dim + heads
    size = mixer.num_heads // mixer.output_groups
    total += heads * dim * mixer.output_rank + -(-heads // size) * mixer.output_rank * hidden
    if (entries := mixer.entries) is None or mixer.inputs is None:
        return total
    series = 1 + entries.overlaps
    index = entries.indexer
    widths = [dim] if index is None else [dim, index.head_dim]
    total += sum(series * width * (2 * hidden + entries.rate) + width for width in widths)
    return total + (0 if index is None else index.num_heads * (mixer.q_rank * index.head_dim + hidden))


def _mlp(mlp: MLPSpec, hidden: int, share: Share) -> int:
    size = share.part(mlp.intermediate_size)
    down = size * hidden + hidden * (mlp.bias or mlp.down_bias)
    learned = 2 if mlp.activation == "xielu" else 0
    if mlp.sub_norm is not None:
        learned += _norm(mlp.sub_norm, size)
    return (2 if mlp.gated else 1) * _linear(hidden, size, mlp.bias) + down + learned


def _router(mlp: MoESpec, hidden: int, share: Share) -> int:
    """Count the parameters of an MoE layer that every token uses."""
    total = _linear(hidden, mlp.num_experts, mlp.bias) + (mlp.num_experts if mlp.correction_bias else 0)
    total += mlp.hashed * mlp.top_k
    if mlp.shared is not None:
        total += _mlp(mlp.shared, hidden, share) + (hidden if mlp.shared_gate else 0)
    return total
