"""How many parameters a DecoderSpec stands for, and how much memory they and the KV cache take, without building the
model: of the whole model, or of what a rank has."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from quire.kvcache.specs import StateShape
from quire.layers.attention_spec import AttentionSpec, HeadShare, LatentAttentionSpec
from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.layers.state_spec import DeltaSpec, Mamba2Spec, MambaSpec, RecurrentSpec, RwkvSpec
from quire.models.spec import CachedSpec, DecoderSpec


@dataclass(frozen=True)
class Share:
    """What a rank has of a model: by default, all of it.

    tp: ranks that divide each layer. The share is that of the first of them, and no other rank has a larger one.
    layers: None for all. expert_ranks: ranks to which the experts are dealt as wholes; 1 if they are divided like the
    other layers.
    """

    tp: int = 1
    layers: range | None = None
    has_embedding: bool = True
    has_head: bool = True
    expert_ranks: int = 1

    @property
    def group(self) -> Any:
        """As much of a Communicator as the shape of a layer depends on."""
        return SimpleNamespace(rank=0, size=self.tp)

    def part(self, size: int) -> int:
        return -(-size // self.tp)


WHOLE = Share()


@dataclass(frozen=True)
class Parameters:
    """The numbers of a model's parameters.

    embedding: the table of token vectors. A token reads one row of it, or all rows if it is the output layer as well
    (tied). head: an output layer of its own. experts: those of all experts. chosen: those of the experts that one token
    uses. rest: all others, which each token uses.
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
        """Those that one token uses."""
        return self.total - self.experts + self.chosen

    @property
    def output(self) -> int:
        """Those of the output layer, whichever table it is."""
        return self.embedding if self.tied else self.head


def parameters_of(spec: DecoderSpec, share: Share = WHOLE) -> Parameters:
    """chosen: with experts that are dealt to ranks, the average of what a token uses on one of them."""
    hidden, width = spec.hidden_size, spec.embedding_size or spec.hidden_size
    table = share.part(spec.vocab_size) * width
    has_head = spec.names.get("lm_head") is not None and share.has_head
    is_tied = bool(spec.tie_embeddings) and has_head
    rest = share.part(spec.vocab_size) if spec.lm_head_bias and has_head else 0
    rest += _norms(spec, (*(("embedding_norm",) if share.has_embedding else ()),
                          *(("final_norm",) if share.has_head else ())))  # fmt: skip
    if share.has_embedding:
        rest += spec.token_types * hidden
        if spec.position_offset is not None:
            rest += (spec.max_positions + spec.position_offset) * hidden
    if width != hidden:
        rest += (share.has_embedding + share.has_head) * width * hidden
    experts = chosen = 0
    for index in range(spec.num_layers) if share.layers is None else share.layers:
        of_experts, of_chosen, others = _layer(spec, index, share)
        experts, chosen, rest = experts + of_experts, chosen + of_chosen, rest + others
    embedding = table if share.has_embedding or is_tied else 0
    head = table if has_head and not is_tied else 0
    return Parameters(embedding, is_tied, head, experts, chosen, rest)


def _layer(spec: DecoderSpec, index: int, share: Share) -> tuple[int, int, int]:
    """The parameters of all experts of a layer, of those that a token uses, and all others."""
    mlp = spec.mlps[index]
    before = ("attention_norm",) if index or spec.first_norm else ()
    rest = _norms(spec, (*before, "attention_post_norm", "mlp_norm", "mlp_post_norm"))
    for part in spec.cached_in(index):
        rest += _mixer(part, share)
        if isinstance(part, MambaSpec) and spec.names.get("dt_norm") is not None:  # with those of B and C
            rest += _norm(part.norm, part.rank + 2 * part.key_dim)
    if not isinstance(mlp, MoESpec):
        return 0, 0, rest + (0 if mlp is None else _mlp(mlp, spec.hidden_size, share))
    rest += _router(mlp, spec.hidden_size, share)
    if share.expert_ranks == 1:
        expert = _mlp(MLPSpec(mlp.intermediate_size, bias=mlp.bias), spec.hidden_size, share)
        return mlp.num_experts * expert, mlp.top_k * expert, rest
    expert = _mlp(MLPSpec(mlp.intermediate_size, bias=mlp.bias), spec.hidden_size, WHOLE)
    return -(-mlp.num_experts // share.expert_ranks) * expert, mlp.top_k * expert // share.expert_ranks, rest


def _norm(norm: NormSpec, size: int) -> int:
    return size * (2 if norm.bias else 1) if norm.affine else 0


def _norms(spec: DecoderSpec, roles: Iterable[str]) -> int:
    return sum(_norm(spec.norm, spec.hidden_size) for role in roles if spec.names.get(role) is not None)


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return (inputs + bias) * outputs


def _mixer(mixer: CachedSpec, share: Share) -> int:
    if isinstance(mixer, RecurrentSpec):
        return _recurrent(mixer, share)
    return _attention(mixer, share) if isinstance(mixer, AttentionSpec) else _latent_attention(mixer, share)


def _recurrent(mixer: RecurrentSpec, share: Share) -> int:
    hidden, shape = mixer.hidden_size, mixer.cache_shape(share.group)
    heads, channels, values = shape.heads, shape.channels, shape.heads * shape.value_dim
    if isinstance(mixer, MambaSpec):
        selected = mixer.rank + 2 * mixer.key_dim
        total = _linear(hidden, 2 * channels, mixer.bias) + channels * (selected + mixer.rank + hidden)
        return total + channels * (mixer.conv_width + mixer.conv_bias + mixer.key_dim + 2) + hidden * mixer.bias
    if isinstance(mixer, Mamba2Spec):
        total = _linear(hidden, values + channels + heads, mixer.bias) + values * hidden + hidden * mixer.bias
        return total + channels * (mixer.conv_width + mixer.conv_bias) + 3 * heads + values * mixer.has_norm
    if isinstance(mixer, RwkvSpec):  # seven mixes with the token before are whole on every rank
        ranks = (mixer.decay_rank, mixer.rate_rank, mixer.gate_rank, mixer.value_rank)
        low = sum(_linear(rank, values, True) + hidden * rank for rank in ranks if rank) - values  # no bias of gates
        return 4 * hidden * values + 7 * hidden + 5 * values + low
    assert isinstance(mixer, DeltaSpec)
    total = channels * mixer.conv_width + heads * (1 + mixer.decays) + mixer.value_dim + values * hidden
    if mixer.projections == "kimi":
        return total + hidden * (channels + heads) + 2 * (hidden + values) * mixer.value_dim
    return total + hidden * (channels + values + 2 * heads)


def _attention(mixer: AttentionSpec, share: Share) -> int:
    mine = HeadShare.of(mixer, share.group)
    dim, heads, kv_heads = mixer.head_dim, len(mine.heads), len(mine.kv_heads)
    outputs = heads * (2 if mixer.output_gate else 1) + 2 * kv_heads
    total = _linear(mixer.input_size or mixer.hidden_size, outputs * dim, mixer.qkv_bias)
    total += heads * dim * mixer.hidden_size + mixer.hidden_size * mixer.output_bias
    if mixer.sub_norm is not None:
        total += _norm(mixer.sub_norm, heads * dim)
    if mixer.qk_norm is not None:
        total += _norm(mixer.qk_norm, dim * (2 if mixer.qk_norm_over == "head" else heads + kv_heads))
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
        of_index, dim = mixer.indexer, mixer.indexer.head_dim
        total += of_index.num_heads * (mixer.q_rank * dim + mixer.hidden_size) + (mixer.hidden_size + 2) * dim
    return total + heads * mixer.value_dim * mixer.hidden_size + mixer.hidden_size * mixer.bias


def _mlp(mlp: MLPSpec, hidden: int, share: Share) -> int:
    size = share.part(mlp.intermediate_size)
    down = size * hidden + hidden * (mlp.bias or mlp.down_bias)
    learned = 2 if mlp.activation == "xielu" else 0
    if mlp.sub_norm is not None:
        learned += _norm(mlp.sub_norm, size)
    return (2 if mlp.gated else 1) * _linear(hidden, size, mlp.bias) + down + learned


def _router(mlp: MoESpec, hidden: int, share: Share) -> int:
    """The parameters of a mixture of experts that every token uses."""
    total = _linear(hidden, mlp.num_experts, mlp.bias) + (mlp.num_experts if mlp.correction_bias else 0)
    if mlp.shared is not None:
        total += _mlp(mlp.shared, hidden, share) + (hidden if mlp.shared_gate else 0)
    return total


FULL, HALF = 4, 2  # bytes of a parameter in float32 and in bfloat16
_QUANTIZED = {"int8": 1.0, "int4": 0.5 + 4 / 128}  # with --quantization; in int4, groups of 128 have a scale in float32


@dataclass(frozen=True)
class Footprint:
    """The memory that a model takes.

    linear, table, head: bytes of a parameter as the checkpoint has it, of linear layers, of the table of token vectors
    and of the output layer. element_bytes: of the KV cache. is_dense: whether --quantization can make the weights
    smaller. generates: False for a model that makes embeddings or scores. share: what a rank has of the model.
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
        """What a rank with this share needs."""
        return replace(self, parameters=parameters_of(self.spec, share), share=share)

    @property
    def layers(self) -> range:
        return range(self.spec.num_layers) if self.share.layers is None else self.share.layers

    @property
    def quantizations(self) -> list[str | None]:
        """The values of --quantization with which the model can be run. None stands for the weights as they are."""
        return [None, *_QUANTIZED] if self.is_dense and self.generates else [None]

    def weights(self, quantization: str | None) -> tuple[float, float]:
        """Bytes of all weights in memory, and of those that are read for each token."""
        p, (linear, table, head) = self.parameters, self.bytes_of_a_parameter(quantization)
        tables, output = table * p.embedding, table * p.embedding if p.tied else head * p.head
        return linear * (p.experts + p.rest) + tables + head * p.head, linear * (p.chosen + p.rest) + output

    def bytes_of_a_parameter(self, quantization: str | None) -> tuple[float, float, float]:
        """Of linear layers, the table and the head, in memory."""
        if quantization is None:
            return self.linear, self.table, self.head
        head = _QUANTIZED["int8"]
        return _QUANTIZED[quantization], head if self.parameters.tied else self.table, head

    def entry(self, layer: int) -> int:
        """Bytes that a layer caches of a token."""
        total = 0
        for part in self.spec.cached_in(layer):
            shape = part.cache_shape(self.share.group)
            if not isinstance(shape, StateShape):
                vectors = 2 if shape.value_dim is None else 1  # keys and values, or one latent
                total += vectors * shape.num_kv_heads * shape.head_dim * self.element_bytes
            if isinstance(part, LatentAttentionSpec) and part.indexer is not None:
                total += part.selects * part.indexer.head_dim * self.element_bytes
        return total

    def state(self, layer: int) -> int:
        """Bytes of the state that a layer caches of a request, however long it is."""
        shapes = (part.cache_shape(self.share.group) for part in self.spec.cached_in(layer))
        return sum(FULL * shape.page_numbers(drafts=0) for shape in shapes if isinstance(shape, StateShape))

    def cache(self, num_tokens: int) -> int:
        """Bytes of the KV cache of one request of so many tokens. A layer with a window keeps no more than that, and a
        recurrent layer one state."""
        if self.spec.is_encoder:
            return 0
        windows = ((layer, self.spec.windows[layer]) for layer in self.layers)
        return sum(
            self.entry(i) * (num_tokens if window is None else min(window, num_tokens)) + self.state(i)
            for i, window in windows
        )
