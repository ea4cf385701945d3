"""An architecture as data: DecoderSpec, and helpers to derive one from a Hugging Face config."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from quire.layers.attention_spec import AttentionSpec, BlockAttentionSpec, LatentAttentionSpec
from quire.layers.compressed_spec import CompressedAttentionSpec, CompressedEntriesSpec, CompressorInputsSpec
from quire.layers.rotary_spec import RotarySpec, max_model_positions, rotary_spec
from quire.layers.specs import AltUpSpec, CycleSpec, HyperSpec, MLPSpec, MoESpec, NormSpec, PerLayerSpec, SkipSpec
from quire.layers.state_spec import (
    DeltaSpec,
    HybridSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    RecurrentSpec,
    RwkvSpec,
    SharedBlockSpec,
    ShortConvSpec,
)
from quire.multimodal.spec import MediaSpec

HfConfig = Mapping[str, Any]  # a checkpoint's config.json
# The mixers that have an entry in the cache
CompressedPart = CompressedAttentionSpec | CompressedEntriesSpec | CompressorInputsSpec
CachedSpec = (
    AttentionSpec
    | LatentAttentionSpec
    | BlockAttentionSpec
    | CompressedPart
    | MambaSpec
    | Mamba2Spec
    | DeltaSpec
    | RwkvSpec
    | ShortConvSpec
    | LightningSpec
)
MixerSpec = CachedSpec | HybridSpec | SharedBlockSpec  # decoder_layers.MIXERS names the layer that implements each kind
Residual = Literal[
    "sequential",
    "parallel",
    "post_norm",
    "single",
    "cross",
    "cross_post_norm",
    "shifted",
    "scaled",
    "altup",
    "hyper",
    "cycle",
    "blocks",
]
# Role -> checkpoint name, without ".weight"; {i} is the layer, {e} the expert, {h} the head. If a role is missing or
# None, the model has no such part.
Names = Mapping[str, str | None]

# By the family that introduced the names; most models use Llama's. An empty name is read as None.
NAMES: Mapping[str, dict[str, str | None]] = {
    family: {role: name or None for role, name in names.items()}
    for family, names in tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8")).items()
}


@dataclass(frozen=True)
class DecoderSpec:
    """Everything that distinguishes one decoder-only model, or one encoder, from another.

    mixers, mlps, windows and rotary have one element for each layer. mixers: the kind of attention. windows: the number
    of tokens that a query attends to, None for all. rotary: None for a layer without rotary embedding. residual: how a
    layer's branches use the residual stream: one after the other ("sequential"), both from the same input ("parallel"),
    with the norm after the sum ("post_norm"), with cross-attention between both ("cross", or "cross_post_norm" with the
    norms after the sums), or with an MLP that also reads the previous token ("shifted", RWKV-7). With "single", a layer
    has one branch only: its mixer or its MLP is None (Mamba-2, Nemotron-H). Layers of a "sequential" model can lack
    either, or both (DeciLM). With "scaled", a branch with the layer's own embeddings may follow, and the stream is
    multiplied by a factor of the layer (Gemma 4). With "altup" and "hyper", there are several streams (Gemma 3n,
    Hunyuan 4). A layer has the norms that `names` contains. position_offset: rows before position 0 in the table of
    learned positions, None if there is no such table. embedding_size: width of the token table if it is not
    hidden_size; the embeddings are then projected. score_scales: one factor for the attention scores of each layer.
    token_types: the number of segment types, each with a vector that is added to its tokens (BERT), see Decoder.embed.
    first_norm: whether the first layer has the norm before its attention. In an encoder, windows are numbers of tokens
    to each side. Without the name "lm_head", a model has no logits. chunks: for each layer, the tokens of a chunk of
    the text; a query attends only within its chunk (Llama 4); None for no chunks. media: of a model with image or audio
    input. crossed: the maximum number of encoder tokens that the cross-attention of each layer reads; 0 for a model
    without an encoder. tie_embeddings: whether the head uses the embedding table; None if it does only in checkpoints
    without a head. layer_names: changes to `names` in some layers (OLMo Hybrid). norms: by role, the norms that differ
    from `norm` (PLaMo 3). skips: the connections between layers that are not neighbours (Solar). per_layer: the
    embeddings of tokens for each layer, None for none. altup: the streams of "altup". hyper: the streams of "hyper".
    weights_of: in a model that goes through some layers several times, the layer of the checkpoint whose weights each
    layer has; layers that share weights still have caches of their own. cycles: of "cycle".
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    mixers: tuple[MixerSpec | None, ...]
    mlps: tuple[MLPSpec | MoESpec | None, ...]
    norm: NormSpec
    rotary: tuple[RotarySpec | None, ...]
    max_positions: int
    windows: tuple[int | None, ...]
    residual: Residual = "sequential"
    tie_embeddings: bool | None = False
    lm_head_bias: bool = False
    embedding_size: int | None = None
    embedding_scale: float | None = None
    position_offset: int | None = None
    residual_scale: float | None = None
    logit_scale: float | None = None
    logit_soft_cap: float | None = None
    score_scales: tuple[float, ...] | None = None
    chunks: tuple[int | None, ...] | None = None
    token_types: int = 0
    first_norm: bool = True
    media: MediaSpec | None = None
    crossed: int = 0
    names: Names = field(default_factory=lambda: NAMES["llama"])
    layer_names: Mapping[int, Names] = field(default_factory=dict)
    norms: Mapping[str, NormSpec] = field(default_factory=dict)
    skips: tuple[SkipSpec, ...] = ()
    per_layer: PerLayerSpec | None = None
    altup: AltUpSpec | None = None
    hyper: HyperSpec | None = None
    weights_of: tuple[int, ...] | None = None
    cycles: CycleSpec | None = None
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$", r"^medusa_head\.")  # patterns of tensors without a parameter

    def names_in(self, layer: int) -> dict[str, str]:
        """Return the names of the tensors of a layer, by role."""
        names = {**self.names, **self.layer_names.get(layer, {})}
        number = str(self.weights_of[layer] if self.weights_of else layer)
        return {role: name.replace("{i}", number) for role, name in names.items() if name is not None}

    @property
    def streams(self) -> int:
        """The number of residual streams."""
        if self.cycles is not None:
            return 3
        if self.residual == "blocks":
            return 2
        several = self.altup or self.hyper
        return 1 if several is None else several.streams

    def first_use(self, layer: int, among: range) -> int:
        """Return the first of these layers that has the same weights."""
        if self.weights_of is None:
            return layer
        mine = self.names_in(layer)
        return next(i for i in among if self.names_in(i) == mine)

    def norm_of(self, role: str) -> NormSpec:
        return self.norms.get(role, self.norm)

    @property
    def has_sections(self) -> bool:
        """Whether a token has several rotary positions; see RotaryEmbedding."""
        return self.media is not None and any(r is not None and "mrope_section" in r.scaling for r in self.rotary)

    @property
    def is_encoder(self) -> bool:
        """Whether tokens also attend to later tokens."""
        mixer = self.mixers[0]
        return isinstance(mixer, AttentionSpec) and not mixer.is_causal

    @property
    def cached(self) -> list[tuple[int, CachedSpec]]:
        """All parts with an entry in the cache, each with its layer."""
        return [(layer, part) for layer in range(self.num_layers) for part in self.cached_in(layer)]

    def cached_in(self, layer: int) -> Sequence[CachedSpec]:
        """Return the parts of a layer that have an entry in the cache."""
        return [part for part in self.parts_in(layer) if not isinstance(part, AttentionSpec) or part.source is None]

    def parts_in(self, layer: int) -> Sequence[CachedSpec]:
        """Return the mixer of a layer, or the parts of a hybrid one, of one with a shared block, or of compressed
        attention."""
        mixer = self.mixers[layer]
        if isinstance(mixer, HybridSpec | SharedBlockSpec):
            return mixer.attention, mixer.recurrent
        if isinstance(mixer, CompressedAttentionSpec):
            return mixer.parts
        return () if mixer is None else (mixer,)

    @property
    def indivisible(self) -> list[range]:
        """Return the layers in groups that must stay on one stage: a layer, and the following ones that share its
        selection, or up to the last one that reads its keys and values, or the stream before it."""
        shared = {i for i, mixer in enumerate(self.mixers) if getattr(mixer, "shares_selection", False)}
        for layer, mixer in enumerate(self.mixers):
            if isinstance(mixer, AttentionSpec):
                for source in (mixer.source, mixer.blended):
                    shared.update(range(layer + 1 if source is None else source + 1, layer + 1))
        for skip in self.skips:
            shared.update(range(skip.source + 1, skip.target + 1))
        starts = [layer for layer in range(self.num_layers) if layer not in shared]
        return [range(start, stop) for start, stop in pairwise([*starts, self.num_layers])]

    @property
    def has_states(self) -> bool:
        return any(isinstance(part, RecurrentSpec) for _, part in self.cached)


Architecture = Callable[[HfConfig], DecoderSpec]


def decoder_spec(
    config: HfConfig,
    *,
    attention: Mapping[str, Any] = {},
    mixer: MixerSpec | tuple[MixerSpec | None, ...] | None = None,
    mlp: MLPSpec | MoESpec | tuple[MLPSpec | MoESpec | None, ...] | None = None,
    norm: NormSpec | None = None,
    rotary: RotarySpec | tuple[RotarySpec | None, ...] | Literal["default"] | None = "default",
    names: Names = {},  # noqa: B006
    **differences: Any,
) -> DecoderSpec:
    """Return the spec of a Llama-like config. An architecture passes only its differences from Llama.

    attention: fields of AttentionSpec that differ. mixer: a spec that replaces AttentionSpec altogether. mixer, mlp and
    rotary: one value for all layers, or a tuple with one for each. names: changes to Llama's.
    """
    layers = config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    hidden = config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    sizes = {"hidden_size": hidden, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    if rotary == "default":
        rotary = rotary_spec(config, head_dim)
    if mixer is None:
        mixer = AttentionSpec(**{**sizes, **attention})
    if mlp is None:
        mlp = MLPSpec(config["intermediate_size"], config.get("hidden_act", "silu"))
    rotaries = rotary if isinstance(rotary, tuple) else (rotary,) * layers
    positions = config.get("max_position_embeddings", 2048)
    longest = [max_model_positions(config, r) for r in rotaries if r is not None]
    common: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "hidden_size": hidden,
        "num_layers": layers,
        "mixers": mixer if isinstance(mixer, tuple) else (mixer,) * layers,
        "mlps": mlp if isinstance(mlp, tuple) else (mlp,) * layers,
        "norm": norm or NormSpec("rms", config.get("rms_norm_eps", 1e-6)),
        "rotary": rotaries,
        "max_positions": max(longest, default=0) or positions,
        "windows": (None,) * layers,
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        "names": {**NAMES["llama"], **names},
    }
    return DecoderSpec(**{**common, **differences})


def bidirectional(spec: DecoderSpec) -> DecoderSpec:
    """Return a decoder as an encoder: tokens also attend to later ones. Raises ValueError if its layers cannot."""
    if any(window is not None for window in spec.windows):
        raise ValueError("a decoder with sliding windows cannot be used as an encoder")
    mixers = []
    for mixer in spec.mixers:
        if not isinstance(mixer, AttentionSpec):
            raise ValueError(f"a decoder with layers of the kind {type(mixer).__name__} cannot be used as an encoder")
        if mixer != replace(mixer, soft_cap=None, sinks=False, alibi=False, temperature=None, source=None):
            raise ValueError("a decoder with soft caps, sinks, ALiBi, temperatures or shared keys is no encoder")
        mixers.append(replace(mixer, is_causal=False))
    return replace(spec, mixers=tuple(mixers))


def rotary_by_window(config: HfConfig, windows: tuple[int | None, ...]) -> tuple[RotarySpec, ...]:
    """Return the rotary spec of each layer, for models whose sliding-window layers have their own rotary parameters."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kinds = ("full_attention" if w is None else "sliding_attention" for w in windows)
    return tuple(rotary_spec(config, head_dim, kind) for kind in kinds)


def layer_windows(config: HfConfig, default: Callable[[int], bool] = lambda i: True) -> tuple[int | None, ...]:
    """Return the window of each layer, by the config's `layer_types` or, without them, by `default(i)`."""
    window = config.get("sliding_window")
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    sliding = [k == "sliding_attention" for k in kinds] if kinds else [default(i) for i in range(layers)]
    return tuple(window if slides else None for slides in sliding)


def with_common_names(config: HfConfig, **names: str) -> HfConfig:
    """Return the config with the common names of its fields. names: the family's own name of each."""
    return {**config, **{name: config[own] for name, own in names.items() if own in config}}


def expert_count(config: HfConfig) -> int:
    """Return the number of experts in a layer. Raises KeyError if the config does not contain it.

    transformers 5 saves `num_local_experts` for families whose first checkpoints have `num_experts`, and reads either
    name, so every family accepts both.
    """
    return int(config["num_local_experts"] if "num_local_experts" in config else config["num_experts"])
