"""Step times by counting: operations, bytes, exchanges and launches, divided by the rates of a device.

Each part of a step takes the longer of the times for its operations and its bytes (the roofline model, Williams et al.,
2009). The parts run one after another. devices.toml has the assumed share of a data sheet's rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.layers.attention_spec import AttentionSpec, LatentAttentionSpec
from quire.layers.specs import MLPSpec, MoESpec
from quire.planner.devices import Device
from quire.planner.exchanges import Axes, Sent, boundary, ends, expected_exchange, layer
from quire.planner.layout import Layout, Stages
from quire.planner.sizes import Footprint
from quire.planner.work import StepWork, Window

ACTIVATION_BYTES = 2  # per element of the hidden state
LARGEST_GRAPH = 1024  # tokens, as in quire/worker/graphs.py
_RATE_OF = {None: "bf16", "int8": "int8", "int4": "bf16", "fp8": "fp8"}  # the type of a product, by --quantization


class StepTimes(Protocol):
    """A model of step times. windows: the attention windows for step_work. With several steps in flight, the devices'
    time for one step may overlap with the host's time for another."""

    windows: tuple[Window, ...]

    def stages(self, works: Sequence[StepWork]) -> list[float]:
        """Return the seconds of a step on each stage. works: the work of each replica that runs its steps together with
        the others."""

    def host(self, works: Sequence[StepWork]) -> float:
        """Return the host's seconds for the step."""


@dataclass(frozen=True)
class _Part:
    """The work of a rank of a stage, counted per token, request or place, and its layers for each window."""

    linear: int  # parameters that each token uses, without the output layer and the experts
    linear_bytes: float
    output: int  # parameters of the output layer
    output_bytes: float
    expert: float  # the rank's parameters of one expert, in all layers of the stage
    experts: int  # experts per layer on the rank
    expert_bytes: float  # bytes per parameter
    entries: tuple[float, ...]  # bytes cached per token in the layers with each window
    score_operations: tuple[float, ...]  # operations per query-key pair in these layers
    moved: float  # bytes of activations read or written per token
    kernels: int
    sent: Sent  # per token, within the tensor group and to the next stage
    sent_at_ends: Sent  # per place
    exchanged: Sent  # per token, to ranks of other replicas


class RooflineTimes:
    """Step times of a layout on a device, by counting."""

    def __init__(
        self,
        footprint: Footprint,
        layout: Layout,
        device: Device,
        quantization: str | None = None,
        kv_element_bytes: int | None = None,
    ) -> None:
        self.device = device
        self.layout = layout
        spec = footprint.spec
        self.windows = tuple(dict.fromkeys(spec.windows))
        self._mixture = next((mlp for mlp in spec.mlps if isinstance(mlp, MoESpec)), None)
        self._products = device.products(_RATE_OF.get(quantization, "bf16") if quantization else _dtype(footprint))
        scale = 1.0 if kv_element_bytes is None else kv_element_bytes / footprint.element_bytes
        self._parts = [self._count(part, quantization, scale) for part in Stages(footprint, layout).parts]
        self._num_kernels = sum(part.kernels for part in self._parts)

    def _count(self, part: Footprint, quantization: str | None, cache_scale: float) -> _Part:
        spec = part.spec
        p = part.parameters
        layout = self.layout
        kind = self.device.kind
        linear_size, _, head_size = part.bytes_of_a_parameter(quantization)
        if p.tied:
            head_size = part.bytes_of_a_parameter(quantization)[1]
        mixtures = [i for i in part.layers if isinstance(spec.mlps[i], MoESpec)]
        experts = -(-self._mixture.num_experts // part.share.expert_ranks) if self._mixture and mixtures else 0
        axes = Axes(layout.tp, pp=layout.pp)
        sent = boundary(spec, axes) if not part.share.has_head else Sent()
        exchanged = Sent()
        for i in part.layers:
            of_layer = layer(spec, i, axes)
            if layout.shares_experts and i in mixtures and layout.tp > 1:  # results are exchanged instead of summed
                of_layer = Sent(of_layer.calls // 2, of_layer.values / 2)
            sent += of_layer
            mlp = spec.mlps[i]
            if layout.shares_experts and isinstance(mlp, MoESpec):
                exchanged += expected_exchange(mlp, spec.hidden_size, layout.dp)
        used = [[i for i in part.layers if spec.windows[i] == window] for window in self.windows]
        return _Part(
            p.rest,
            p.rest * linear_size,
            p.output if part.share.has_head else 0,
            p.output * head_size if part.share.has_head else 0.0,
            p.experts / experts if experts else 0.0,
            experts,
            linear_size,
            tuple(sum(part.entry(i) for i in layers) * cache_scale for layers in used),
            tuple(sum(_score_operations(part, i) for i in layers) for layers in used),
            sum(_moved(part, i) for i in part.layers) * ACTIVATION_BYTES,
            len(part.layers) * kind.kernels + len(mixtures) * kind.expert_kernels + 2,
            sent,
            ends(spec, axes) if part.share.has_head else Sent(),
            exchanged,
        )

    @property
    def entries(self) -> tuple[float, ...]:
        """Return the bytes that a rank of the first stage caches per token in the layers with each window."""
        return self._parts[0].entries

    @property
    def score_operations(self) -> tuple[float, ...]:
        """Return the operations per query-key pair in these layers."""
        return self._parts[0].score_operations

    def stages(self, works: Sequence[StepWork]) -> list[float]:
        everywhere = sum(work.tokens for work in works)  # tokens whose experts may be on any of the replicas
        return [max(sum(self._times(part, work, everywhere).values()) for work in works) for part in self._parts]

    def host(self, works: Sequence[StepWork]) -> float:
        kind = self.device.kind
        if not kind.is_gpu:
            return 0.0  # the host runs the step itself
        is_captured = not self.layout.shares_experts and max(work.tokens for work in works) <= LARGEST_GRAPH
        launches = kind.graph if is_captured else self._num_kernels / len(self._parts) * kind.launch
        return kind.step + kind.request * max(work.requests for work in works) + launches

    def explain(self, work: StepWork) -> dict[str, float]:
        """Return the seconds of each part of a step of one replica, over all stages."""
        times = [self._times(part, work, work.tokens) for part in self._parts]
        return {name: sum(of_part[name] for of_part in times) for name in times[0]}

    def _times(self, part: _Part, work: StepWork, everywhere: int) -> dict[str, float]:
        device = self.device
        kind = self.device.kind
        layout = self.layout
        bandwidth = device.reached_bandwidth
        products = self._products
        times = {
            "linear layers": max(part.linear_bytes / device.weight_bandwidth, 2 * part.linear * work.tokens / products),
            "output layer": max(part.output_bytes / device.weight_bandwidth, 2 * part.output * work.places / products)
            * (work.places > 0),
            "experts": self._experts(part, work, everywhere),
            "cached keys": 0.0,
            "attention": 0.0,
            "activations": part.moved * work.tokens / bandwidth,
            "launches": part.kernels * kind.kernel,
            "exchanges": 0.0,
            "step": 0.0 if kind.is_gpu else kind.step + kind.request * work.requests,
        }
        for i, (entry, operations) in enumerate(zip(part.entries, part.score_operations, strict=True)):
            times["cached keys"] += max(work.read[i] * entry / bandwidth, work.read[i] * operations / device.attention)
            times["attention"] += max(work.keys[i] * entry / bandwidth, work.pairs[i] * operations / device.attention)
        sent = (part.sent, work.tokens), (part.sent_at_ends, work.places), (part.exchanged, work.tokens)
        if layout.ranks > 1:
            values = sum(of.values * count for of, count in sent)
            times["exchanges"] = values * ACTIVATION_BYTES / (device.link * kind.link_share)
            times["exchanges"] += sum(of.calls for of, _ in sent) * kind.exchange
        return times

    def _experts(self, part: _Part, work: StepWork, everywhere: int) -> float:
        """Return the time of the experts in seconds. Each token chooses them independently and with equal probability,
        which
        --enable-eplb aims at."""
        mlp = self._mixture
        ranks = self.layout.tp * self.layout.dp if self.layout.ep else 1
        if mlp is None or not part.experts:
            return 0.0
        tokens = everywhere if self.layout.shares_experts else work.tokens
        chosen = part.experts * (1 - (1 - mlp.top_k / mlp.num_experts) ** tokens)
        operations = 2 * part.expert * tokens * mlp.top_k / ranks
        return max(chosen * part.expert * part.expert_bytes / self.device.weight_bandwidth, operations / self._products)


def _dtype(footprint: Footprint) -> str:
    """Return the type of the products for an unquantized run of the checkpoint; with about 8 bits per weight, it is
    fp8."""
    return "fp8" if 0.9 < footprint.linear < 1.2 else "bf16"


def _attention(part: Footprint, index: int) -> AttentionSpec | LatentAttentionSpec:
    """Return the attention of a layer. Models with recurrent layers cannot be planned."""
    mixer = part.spec.mixers[index]
    assert isinstance(mixer, AttentionSpec | LatentAttentionSpec)
    return mixer


def _score_operations(part: Footprint, index: int) -> float:
    """Return the operations per query-key pair in a layer: a product for the score, and one with the value."""
    mixer = _attention(part, index)
    shape = mixer.cache_shape(part.share.group)
    if isinstance(mixer, AttentionSpec):
        return 2.0 * shape.num_heads * 2 * mixer.head_dim
    return 2.0 * shape.num_heads * (shape.head_dim + mixer.kv_rank)  # in absorbed form


def _moved(part: Footprint, index: int) -> float:
    """Return the elements that a layer reads or writes per token, excluding weights and cache: the residual and two
    norms, queries, keys and values, attention results, and MLP results before and after the activation."""
    spec = part.spec
    mixer = _attention(part, index)
    mlp = part.spec.mlps[index]
    assert mlp is not None
    shape = mixer.cache_shape(part.share.group)
    heads = shape.num_heads * (mixer.head_dim if isinstance(mixer, AttentionSpec) else shape.head_dim)
    inner = mlp.intermediate_size if isinstance(mlp, MLPSpec) else mlp.top_k * mlp.intermediate_size
    return 8 * spec.hidden_size + 4 * heads + 4 * shape.num_kv_heads * shape.head_dim + 6 * inner / part.share.tp
