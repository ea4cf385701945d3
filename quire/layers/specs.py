"""The parts of a model as data, without torch: norms, feed-forward layers and outputs of linear layers."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OutputPart:
    """Outputs [start, stop) of the checkpoint's linear layer `name`, which has `rows` outputs in all. has_bias: False
    for a part without a bias in a layer that has one."""

    name: str
    rows: int
    start: int
    stop: int
    has_bias: bool = True


@dataclass(frozen=True)
class NormSpec:
    """The kind of norm that a model has.

    bias: whether a layer norm has a bias. affine: whether the norm has a weight. wide: the product with the weight is
    also in float32 (the RMS norm of Gemma, OLMo-2, gpt-oss). offset: added to the checkpoint's weight (Gemma and
    Nemotron store weight - 1). scale: the factor of an RMS norm's weight.
    """

    kind: Literal["rms", "layer"]
    eps: float
    bias: bool = False
    affine: bool = True
    wide: bool = False
    offset: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class MLPSpec:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) if it is not gated. transposed: see LinearShape. down_bias: only
    `down` has a bias. multipliers: the factors of gate and down (Falcon-H1). sub_norm: an RMS norm before `down`
    (BitNet). sparsity: the share of gates that are 0, as if they were normally distributed (Gemma 3n). The activation
    "xielu" has learned parameters (see layers/xielu.py). swiglu: alpha and limit of the activations "swiglu_oai",
    "limited_swiglu" and "swiglu_step", see ops/reference/elementwise.py; the last two have no alpha."""

    intermediate_size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    transposed: bool = False
    down_bias: bool = False
    multipliers: tuple[float, float] = (1.0, 1.0)
    sub_norm: NormSpec | None = None
    sparsity: float = 0.0
    swiglu: tuple[float, float] = (1.702, 7.0)


@dataclass(frozen=True)
class MoESpec:
    """num_experts feed-forward layers, of which each token uses top_k.

    swiglu: see MLPSpec. scoring: the function from the router's logits to scores;
    "sparse_mixer" chooses two experts one after the other (Phi-3.5-MoE, see ops/reference/routing.py). normalize: the
    scores of the chosen experts are scaled to sum to 1. scale: factor of the result. groups: only experts of the
    topk_groups best groups can be chosen. group_score: the score of a group's best expert, or the sum of its two best.
    correction_bias: a bias is added to the scores only for the choice (DeepSeek-V3, arXiv:2412.19437); a checkpoint may
    store it as a row, [1, experts] (ERNIE 4.5). shared: an expert that every token uses. shared_gate: its result is
    multiplied by sigmoid(gate(x)). layout: every expert has its own tensors ("separate"), or a tensor [experts, in,
    out] holds one projection of all experts, in which gate and up alternate ("fused", gpt-oss) or follow each other
    ("fused_halves", Llama 4), or a tensor [experts, out, in], in which up follows gate, or two tensors, one for each
    ("stacked", Granite and Step 3), or three tensors [experts * size, hidden] ("rows", DBRX).
    weigh_inputs: the weight of a token's single expert multiplies the expert's input, not its result (Llama 4). apart:
    routed and shared experts are branches with norms of their own, the router has a norm, too, and each expert's result
    has a factor (Gemma 4); only for the layout "stacked". gated: see MLPSpec; only for the layout "separate".
    hashed: the rows of a table with the experts of each token id, 0 if the router chooses them (DeepSeek-V4).
    latent_size: the width of the experts' inputs and results, which are projections (Nemotron 3); 0 for hidden_size. If
    the family also has names for single experts, the checkpoint decides the layout (layers/moe.py).
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    activation: str = "silu"
    swiglu: tuple[float, float] = (1.702, 7.0)
    scoring: Literal["softmax", "sigmoid", "sparse_mixer", "sqrt_softplus"] = "softmax"
    jitter: float = 0.0  # sparse mixer: half the distance from the best score within which others share the weight
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    topk_groups: int = 1
    group_score: Literal["best", "two_best"] = "best"
    correction_bias: bool | Literal["row"] = False
    bias: bool = False  # whether the router and the experts have biases
    shared: MLPSpec | None = None
    shared_gate: bool = False
    layout: Literal["separate", "fused", "fused_halves", "stacked", "rows"] = "separate"
    weigh_inputs: bool = False
    apart: bool = False
    gated: bool = True
    latent_size: int = 0
    hashed: int = 0

    def check(self) -> None:
        """Raise ValueError if a token cannot use `top_k` experts."""
        size = self.num_experts
        left = 0
        if self.groups > 1:
            (size, left), least = divmod(self.num_experts, self.groups), 1 + (self.group_score == "two_best")
            if left or size < least or self.topk_groups > self.groups:
                raise ValueError(
                    f"{self.num_experts} experts cannot be in {self.groups} groups, of which a token uses "
                    f"{self.topk_groups}"
                )
            size *= self.topk_groups
        if not 0 < self.top_k <= size:
            raise ValueError(f"a token can use 1 to {size} of {self.num_experts} experts, not {self.top_k}")


@dataclass(frozen=True)
class PerLayerSpec:
    """A table with a vector of each token for each layer (Gemma 3n and 4). size: of a vector. vocab_size: rows of the
    table; ids beyond it read row 0. activation: of the gates in layers, see layers/per_layer.py. padding: the id
    whose row tokens of pictures read."""

    size: int
    vocab_size: int
    activation: str
    padding: int = 0


@dataclass(frozen=True)
class AltUpSpec:
    """Several residual streams, of which each layer computes one and predicts the others (Gemma 3n, see
    layers/altup.py). scales_correction: whether the branch with a layer's own embeddings reads a scaled stream.
    laurel_rank: of the low-rank branch beside attention."""

    streams: int
    scales_correction: bool
    laurel_rank: int


@dataclass(frozen=True)
class HyperSpec:
    """Several residual streams that are read and changed with weights (Hunyuan 4, see layers/hyper.py). eps: added to
    weights. magnitude: the largest weight of a branch's result. balances: how often the matrix that mixes the streams
    is balanced; 0 if they are not mixed (DeepSeek-V4)."""

    streams: int
    eps: float
    magnitude: float
    balances: int = 0


@dataclass(frozen=True)
class CycleSpec:
    """Two stacks of layers that take turns (HRM, arXiv:2506.21734): the low one `low` times, then the high one, and so
    on. layers: in a stack."""

    layers: int
    low: int

    def place(self, layer: int) -> tuple[bool, bool, bool]:
        """Return whether a layer is the first of a run through a stack, whether it is the last, and whether the stack
        is the high one."""
        run, within = divmod(layer, self.layers)
        return within == 0, within == self.layers - 1, run % (self.low + 1) == self.low


@dataclass(frozen=True)
class SkipSpec:
    """Before the layer `target`, the residual stream becomes (1 - weight) * stream + weight * the stream before the
    layer `source`, in the order of DecoderSpec.skips."""

    source: int
    target: int
    weight: float


@dataclass(frozen=True)
class DenseSpec:
    """norm(activation(x W^T + b)). name: the name of the weight in the checkpoint, or with a folder, in the checkpoint
    in that folder, or in the torch file of that name. bias: None if the checkpoint may have one. norm: None for no
    norm; norm_name: its name. bias_name: the bias's name if it is not `name`. rows: the computed outputs out of the
    checkpoint's `out_features`; empty for all. The activation "difference" subtracts the first of two outputs from the
    second."""

    name: str
    in_features: int
    out_features: int
    bias: bool | None = True
    activation: str = "identity"
    norm: NormSpec | None = None
    norm_name: str = ""
    folder: str = ""
    bias_name: str | None = None
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenChoice:
    """The tokens of a text that are pooled. ids: only tokens with one of these ids, grouped by id in this order; empty
    for all. without_first, without_last: leave out the first or the last token if it has this id."""

    ids: tuple[int, ...] = ()
    without_first: int | None = None
    without_last: int | None = None


Pooling = Literal["cls", "last", "mean", "max", "mean_sqrt_len", "weighted_mean", "all"]


@dataclass(frozen=True)
class PoolerSpec:
    """How a text's final hidden states are pooled.

    of_tokens: layers that are applied to each token first. pooling: how one vector is made of all tokens: the first or
    the last token's vector, their mean or maximum, their sum divided by the root of their number, or their mean
    weighted with 1, 2, 3 ...; "all" keeps a vector for each token. layers: the layers that are applied to the pooled
    vectors. labels: the labels of a classifier, whose results are scores; empty for embeddings. activation: the
    activation of a classifier's scores, which are first reduced by `mean` and divided by `sigma`. normalize: scale
    embeddings to length 1. tokens: None for all tokens.
    """

    pooling: Pooling
    of_tokens: tuple[DenseSpec, ...] = ()
    layers: tuple[DenseSpec, ...] = ()
    labels: tuple[str, ...] = ()
    activation: Literal["identity", "relu", "sigmoid", "softmax"] = "identity"
    normalize: bool = True
    tokens: TokenChoice | None = None
    mean: float = 0.0
    sigma: float = 1.0

    @property
    def is_classifier(self) -> bool:
        return bool(self.labels)

    @property
    def of_each_token(self) -> bool:
        return self.pooling == "all"

    @property
    def reads_last_token_only(self) -> bool:
        return self.pooling == "last" and self.tokens is None
