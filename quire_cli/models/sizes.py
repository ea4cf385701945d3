"""How many parameters a DecoderSpec stands for, and how much memory they and the KV cache take, without building the
model."""

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from quire.kvcache.specs import StateShape
from quire.layers.attention_spec import AttentionSpec, LatentAttentionSpec
from quire.layers.specs import MLPSpec, MoESpec, NormSpec
from quire.layers.state_spec import DeltaSpec, Mamba2Spec
from quire.models.spec import CachedSpec, DecoderSpec

_ONE_RANK: Any = SimpleNamespace(rank=0, size=1)  # as much of a Communicator as the shape of a cache depends on


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


def parameters_of(spec: DecoderSpec) -> Parameters:
    hidden, width = spec.hidden_size, spec.embedding_size or spec.hidden_size
    table = spec.vocab_size * width
    has_head = spec.names.get("lm_head") is not None
    bias = spec.vocab_size if spec.lm_head_bias and has_head else 0
    rest = bias + _norms(spec, ("embedding_norm", "final_norm")) + spec.token_types * hidden
    if spec.position_offset is not None:
        rest += (spec.max_positions + spec.position_offset) * hidden
    if width != hidden:
        rest += 2 * width * hidden
    experts = chosen = 0
    rest += sum(_mixer(mixer) for _, mixer in spec.cached)
    for index, mlp in enumerate(spec.mlps):
        before = ("attention_norm",) if index or spec.first_norm else ()
        rest += _norms(spec, (*before, "attention_post_norm", "mlp_norm", "mlp_post_norm"))
        if isinstance(mlp, MLPSpec):
            rest += _mlp(mlp, hidden)
        elif mlp is not None:
            expert = _mlp(MLPSpec(mlp.intermediate_size, bias=mlp.bias), hidden)
            experts, chosen = experts + mlp.num_experts * expert, chosen + mlp.top_k * expert
            rest += _router(mlp, hidden)
    is_tied = spec.tie_embeddings and has_head
    head = table if has_head and not is_tied else 0
    return Parameters(table, is_tied, head, experts, chosen, rest)


def _norm(norm: NormSpec, size: int) -> int:
    return size * (2 if norm.bias else 1) if norm.affine else 0


def _norms(spec: DecoderSpec, roles: Iterable[str]) -> int:
    return sum(_norm(spec.norm, spec.hidden_size) for role in roles if spec.names.get(role) is not None)


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return (inputs + bias) * outputs


def _mixer(mixer: CachedSpec) -> int:
    if isinstance(mixer, Mamba2Spec | DeltaSpec):
        return _recurrent(mixer)
    return _attention(mixer) if isinstance(mixer, AttentionSpec) else _latent_attention(mixer)


def _recurrent(mixer: Mamba2Spec | DeltaSpec) -> int:
    hidden, heads, shape = mixer.hidden_size, mixer.num_heads, mixer.cache_shape(_ONE_RANK)
    values, channels = heads * mixer.value_dim, shape.channels
    if isinstance(mixer, Mamba2Spec):
        total = _linear(hidden, values + channels + heads, mixer.bias) + _linear(values, hidden, mixer.bias)
        return total + channels * (mixer.conv_width + mixer.conv_bias) + 3 * heads + values * mixer.has_norm
    total = channels * mixer.conv_width + heads * (1 + mixer.decays) + mixer.value_dim + values * hidden
    if mixer.projections == "kimi":
        return total + hidden * (channels + heads) + 2 * (hidden + values) * mixer.value_dim
    return total + hidden * (channels + values + 2 * heads)


def _attention(mixer: AttentionSpec) -> int:
    dim, heads, kv_heads = mixer.head_dim, mixer.num_heads, mixer.num_kv_heads
    total = _linear(
        mixer.input_size or mixer.hidden_size, (heads * (1 + mixer.output_gate) + 2 * kv_heads) * dim, mixer.qkv_bias
    )
    total += _linear(heads * dim, mixer.hidden_size, mixer.output_bias)
    if mixer.qk_norm is not None:
        total += _norm(mixer.qk_norm, dim * (2 if mixer.qk_norm_over == "head" else heads + kv_heads))
    return total + (heads if mixer.sinks else 0)


def _latent_attention(mixer: LatentAttentionSpec) -> int:
    queries = mixer.num_heads * (mixer.nope_dim + mixer.rope_dim)
    if mixer.q_rank is None:
        total = mixer.hidden_size * queries
    else:
        total = _linear(mixer.hidden_size, mixer.q_rank, mixer.bias) + mixer.q_rank * queries
        total += _norm(mixer.norm, mixer.q_rank)
    total += _linear(mixer.hidden_size, mixer.kv_rank + mixer.rope_dim, mixer.bias) + _norm(mixer.norm, mixer.kv_rank)
    total += mixer.kv_rank * mixer.num_heads * (mixer.nope_dim + mixer.value_dim)
    return total + _linear(mixer.num_heads * mixer.value_dim, mixer.hidden_size, mixer.bias)


def _mlp(mlp: MLPSpec, hidden: int) -> int:
    size = mlp.intermediate_size
    return (2 if mlp.gated else 1) * _linear(hidden, size, mlp.bias) + _linear(size, hidden, mlp.bias or mlp.down_bias)


def _router(mlp: MoESpec, hidden: int) -> int:
    """The parameters of a mixture of experts that every token uses."""
    total = _linear(hidden, mlp.num_experts, mlp.bias) + (mlp.num_experts if mlp.correction_bias else 0)
    if mlp.shared is not None:
        total += _mlp(mlp.shared, hidden) + (hidden if mlp.shared_gate else 0)
    return total


FULL, HALF = 4, 2  # bytes of a parameter in float32 and in bfloat16
_QUANTIZED = {"int8": 1.0, "int4": 0.5 + 4 / 128}  # with --quantization; in int4, groups of 128 have a scale in float32


@dataclass(frozen=True)
class Footprint:
    """The memory that a model takes.

    linear, table, head: bytes of a parameter as the checkpoint has it, of linear layers, of the table of token vectors
    and of the output layer. element_bytes: of the KV cache. is_dense: whether --quantization can make the weights
    smaller. generates: False for a model that makes embeddings or scores.
    """

    spec: DecoderSpec
    parameters: Parameters
    linear: float
    table: float
    head: float
    is_dense: bool = False
    element_bytes: int = HALF
    generates: bool = True

    @property
    def quantizations(self) -> list[str | None]:
        """The values of --quantization with which the model can be run. None stands for the weights as they are."""
        return [None, *_QUANTIZED] if self.is_dense and self.generates else [None]

    def weights(self, quantization: str | None) -> tuple[float, float]:
        """Bytes of all weights in memory, and of those that are read for each token."""
        linear, table, head = self.linear, self.table, self.head
        if quantization is not None:
            linear, head = _QUANTIZED[quantization], _QUANTIZED["int8"]
            table = head if self.parameters.tied else table  # only an output layer is quantized
        p = self.parameters
        tables, output = table * p.embedding, table * p.embedding if p.tied else head * p.head
        return linear * (p.experts + p.rest) + tables + head * p.head, linear * (p.chosen + p.rest) + output

    def cache(self, num_tokens: int) -> int:
        """Bytes of the KV cache of one request of so many tokens. A layer with a window keeps no more than that, and a
        recurrent layer one state."""
        if self.spec.is_encoder:
            return 0
        total = states = 0
        for layer, mixer in self.spec.cached:
            shape, window = mixer.cache_shape(_ONE_RANK), self.spec.windows[layer]
            if isinstance(shape, StateShape):
                states += 4 * shape.page_numbers(drafts=0)
                continue
            vectors = 2 if shape.value_dim is None else 1  # keys and values, or one latent
            elements = vectors * shape.num_kv_heads * shape.head_dim
            total += elements * (num_tokens if window is None else min(window, num_tokens))
        return total * self.element_bytes + states
