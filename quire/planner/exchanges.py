"""The communication between ranks, for each axis of a layout.

`layer`, `boundary` and `ends` are formulas, which tests compare with counts in real layers
(benchmarks/bytes_of_axes.py). Numbers are the elements that a rank sends in a ring. For a tensor of n elements and N
ranks, these are n (N - 1) / N in a reduce-scatter or an all-gather, twice as many in an all-reduce, and n if it is sent
to one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.layers.attention_spec import AttentionSpec
from quire.layers.specs import MoESpec
from quire.models.spec import DecoderSpec


@dataclass(frozen=True)
class Sent:
    """calls: the number of exchanges of a rank. values: the total number of elements that it sends."""

    calls: int = 0
    values: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.calls + other.calls, self.values + other.values)

    def __mul__(self, times: int) -> Sent:
        return Sent(self.calls * times, self.values * times)


@dataclass(frozen=True)
class Axes:
    """tp: ranks that share each layer. divides_tokens: --enable-sequence-parallel. pp: stages."""

    tp: int = 1
    divides_tokens: bool = False
    pp: int = 1


def layer(spec: DecoderSpec, index: int, axes: Axes) -> Sent:
    """Return what a rank sends for each token in a layer."""
    if axes.tp == 1:
        return Sent()
    mixer = spec.mixers[index]
    parallel = spec.residual == "parallel"
    part = (axes.tp - 1) / axes.tp
    sums = 1 if parallel else 2
    inputs = (
        2 if parallel and spec.names.get("mlp_norm") is not None else sums
    )  # gathered if tokens are divided among ranks
    out = Sent(sums, 2 * sums * spec.hidden_size * part)
    if axes.divides_tokens:
        out = Sent(sums + inputs, (sums + inputs) * spec.hidden_size * part)
    if isinstance(mixer, AttentionSpec) and mixer.qk_norm is not None and mixer.qk_norm_over == "all":
        out += Sent(2, 2 * 2 * part)  # the squares of its queries and keys
    return out


def boundary(spec: DecoderSpec, axes: Axes) -> Sent:
    """Return what a rank sends per token to the next stage, and to its tensor group there, which combines the parts."""
    if axes.pp == 1:
        return Sent()
    joins = axes.tp > 1 and not axes.divides_tokens
    return Sent(1, spec.hidden_size / axes.tp) + Sent(joins, joins * spec.hidden_size * (axes.tp - 1) / axes.tp)


def ends(spec: DecoderSpec, axes: Axes) -> Sent:
    """Return what a rank sends for each token at the embedding, and for each sampled token at the head."""
    if axes.tp == 1:
        return Sent()
    part = (axes.tp - 1) / axes.tp
    out = Sent(2, (2 * (spec.embedding_size or spec.hidden_size) + spec.vocab_size) * part)
    return out + Sent(1, spec.hidden_size * part) if axes.divides_tokens else out


def exchange(mlp: MoESpec, hidden: int, ranks: float, elsewhere: float) -> Sent:
    """Return what a replica sends per token in an MoE layer whose experts are distributed over replicas. It sends the
    token and its expert numbers to `ranks` other replicas, and the results of `elsewhere` choices back to other
    replicas. The row counts, which are exchanged first, do not depend on the token and are left out."""
    return Sent(3, ranks * (hidden + mlp.top_k) + elsewhere * hidden)


def expected_exchange(mlp: MoESpec, hidden: int, replicas: int) -> Sent:
    """Return the expected exchange for tokens whose choices are independent and equally likely on each replica."""
    there = 1 - (1 - 1 / replicas) ** mlp.top_k  # probability that a replica has any of a token's experts
    return exchange(mlp, hidden, (replicas - 1) * there, mlp.top_k * (replicas - 1) / replicas)
