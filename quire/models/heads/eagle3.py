"""The heads of EAGLE-3 and P-EAGLE, which read the hidden states of several layers of the target model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.embedding import LMHead, VocabParallelEmbedding
from quire.layers.forward_state import ForwardState
from quire.layers.linear import ReplicatedLinear
from quire.layers.norm import Norm, make_norm
from quire.models.decoder import Decoder
from quire.models.heads.eagle_layers import EagleLayers
from quire.models.spec import HfConfig

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


class NormedInput(Norm):
    """Replaces the first layer's norm: splits x, the layer's normed input followed by the residual stream."""

    def __init__(self, size: int) -> None:
        self.size = size

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        return x[:, : -self.size], x[:, -self.size :]


class Eagle3Head(EagleLayers):
    """EAGLE-3 (arXiv:2503.01840), EAGLE 3.1, and P-EAGLE (arXiv:2602.01469), as Llama or Qwen3 layers.

    The hidden states of the tapped layers are projected to the head's hidden state. The attention of the first layer
    reads a normed embedding concatenated with a normed hidden state. The residual stream starts with the hidden state.
    The head has its own language-model head, whose vocabulary may be a subset of the target model's. It may also have
    its own embedding.

    These fields of the config are optional, and may be in its `eagle_config`. norm_before_residual: the residual stream
    starts with the normed hidden state. norm_before_fc: one norm before the projection, for all tapped states together.
    fc_norm: a norm for each of them. norm_output: the final norm applies to the hidden state that is fed back, too.
    use_aux_hidden_state: if false, the head reads the final hidden states, without a projection.
    """

    ignored = (*EagleLayers.ignored, r"^t2d$", r"^verifier_(norm|lm_head)\.")

    def __init__(
        self, builder: Builder, config: HfConfig, target: Decoder, has: Callable[[str], bool], max_model_len: int
    ) -> None:
        options = settings(config)
        prefix = "layers.{i}."
        if has("midlayer.hidden_norm.weight"):  # the name of the only layer in the first publication
            options = {**options, "num_hidden_layers": 1}
            prefix = "midlayer."
        size = options["hidden_size"]
        of_target = target.spec.hidden_size
        taps = tapped_layers(config, target.spec.num_layers) if options.get("use_aux_hidden_state", True) else ()
        expected = (options.get("target_hidden_size") or of_target) if taps else size
        if expected != of_target:
            raise ValueError(f"the EAGLE-3 head expects target_hidden_size={expected}, but its target has {of_target}")
        super().__init__(builder, options, has, max_model_len, 2 * size, prefix)

        def norm(name: str, width: int) -> Norm:
            return make_norm(builder, name, width, self.spec.norm)

        first = prefix.replace("{i}", "0")
        self.layers[0].attention_norm = NormedInput(size)
        self.embedding_norm, self.hidden_norm = norm(f"{first}input_layernorm", size), norm(f"{first}hidden_norm", size)
        self.final_norm = norm("norm", size)
        self.norm_before_residual = bool(options.get("norm_before_residual", False))
        self.norm_output = bool(options.get("norm_output", False))
        self.taps = taps
        width = max(1, len(taps)) * of_target
        self.fc = ReplicatedLinear(builder, "fc", width, size, has("fc.bias")) if taps else None
        self.input_norm = norm("input_norm", width) if options.get("norm_before_fc") else Norm(builder.kernels)
        count = len(taps) if options.get("fc_norm") else 0
        self.fc_norms = [norm(f"fc_norm.{i}", of_target) for i in range(count)]

        self.embedding = target.embedding
        rows = options["vocab_size"]
        if has("embed_tokens.weight") or size != (target.spec.embedding_size or of_target):
            if rows < target.vocab_size:
                raise ValueError(f"the EAGLE-3 head has vocab_size={rows}, but its target has {target.vocab_size}")
            self.embedding = VocabParallelEmbedding(builder, "embed_tokens", rows, size, is_head=False)
        columns = options.get("draft_vocab_size") or rows
        self.head: Callable[[Tensor], Tensor] = target.logits
        if has("lm_head.weight") or columns != target.vocab_size or size != of_target:
            self.head = LMHead(builder, "lm_head", columns, size, tied=None)
        self._read_token_ids(builder, has("d2t"), columns, target.vocab_size)
        if has("mask_hidden"):
            self._read_mask(builder, options, width, size)

    def _read_token_ids(self, builder: Builder, has_offsets: bool, columns: int, vocab_size: int) -> None:
        """Load the column ids. A checkpoint may contain the difference between a column's target id and its number."""
        if columns > vocab_size:
            raise ValueError(f"the EAGLE-3 head has draft_vocab_size={columns}, but its target has {vocab_size} tokens")
        if not has_offsets and columns == vocab_size:
            return
        ids = self.token_ids = torch.arange(columns, device=builder.device)
        if not has_offsets:
            return
        offsets = builder.whole("d2t", columns, dtype=torch.int64)

        def add() -> None:
            ids.add_(offsets)
            if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                message = f"d2t of the EAGLE-3 head leads to tokens that its target does not have ({vocab_size})"
                raise ValueError(message)

        builder.when_loaded(add)

    def _read_mask(self, builder: Builder, options: Mapping[str, Any], width: int, size: int) -> None:
        names = ("pard_token", "ptd_token_id", "mask_token_id")
        token = next((options[name] for name in names if options.get(name) is not None), None)
        if token is None:
            raise ValueError(f"the EAGLE-3 head has a mask_hidden, but its config.json has none of {', '.join(names)}")
        states = builder.parameter(1, 1, width)
        hidden = builder.parameter(size)
        builder.part("mask_hidden", states, (width,))
        builder.when_loaded(lambda: hidden.copy_(self._project(states[0])[0]))  # type: ignore[arg-type]
        self.mask = (int(token), hidden)

    def combine(self, states: Sequence[Tensor]) -> Tensor:
        return self._project(states[0] if len(states) == 1 else torch.cat(tuple(states), dim=-1))

    def _project(self, x: Tensor) -> Tensor:
        """x: the concatenated hidden states of all taps, [tokens, width] -> [tokens, hidden]"""
        if self.fc is None:
            return x
        x = self.input_norm(x)
        if self.fc_norms:
            parts = x.chunk(len(self.fc_norms), dim=-1)
            x = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], dim=-1)
        return self.fc(x)

    def embed(self, ids: Tensor, hidden: Tensor) -> Tensor:
        normed = self.hidden_norm(hidden)
        stream = normed if self.norm_before_residual else hidden
        return torch.cat((self.embedding_norm(self.embedding(ids)), normed, stream), dim=-1)

    def forward(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        normed, stream = self.final_norm.add(*self.run(x, state, wanted))
        return normed if self.norm_output else stream

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden if self.norm_output else self.final_norm(hidden))


def settings(config: HfConfig) -> dict[str, Any]:
    """Return the config's fields on one level. Heads of `speculators` nest the fields of their layers."""
    of_layers = config.get("transformer_layer_config") or {}
    of_eagle = config.get("eagle_config") or {}
    default = {"norm_before_residual": True} if config.get("speculators_model_type") == "eagle3" else {}  # as in vLLM
    return {**default, **config, **of_layers, **of_eagle}


def tapped_layers(config: HfConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers of the target model after which the head reads the residual stream; -1 is the embedding.

    The ids in a config count the inputs of layers, as in vLLM: id 2 is the input of layer 2, so the output of layer 1.
    But in `eagle_config`, ids that begin with 1 are the layers whose outputs are read, as in SpecForge, ModelOpt and
    SGLang. The default is EAGLE's layers, or others if the model is too small for them. Raises ValueError if there are
    no such layers.
    """
    ids = config.get(LAYER_IDS)
    of_eagle = (config.get("eagle_config") or {}).get(LAYER_IDS)
    if not ids and of_eagle:
        ids = [i + 1 for i in of_eagle] if min(of_eagle) == 1 else of_eagle
    if not ids:
        least = 2 if num_layers > 6 else min(1, num_layers - 3)
        ids = (least, num_layers // 2, num_layers - (3 if num_layers > 6 else 1))
    if len(set(ids)) < len(ids) or not set(ids) <= set(range(num_layers + 1)):
        raise ValueError(
            f"an EAGLE-3 head cannot read the inputs of the layers {', '.join(map(str, ids))} of a model "
            f"with {num_layers} layers; correct {LAYER_IDS} in its config.json"
        )
    return tuple(sorted(i - 1 for i in ids))


def eagle3(
    builder: Builder, config: HfConfig, target: Decoder, has: Callable[[str], bool], max_model_len: int
) -> Eagle3Head:
    """The HeadMaker of EAGLE-3. Raises KeyError for a missing field, and ValueError for one that does not fit."""
    return Eagle3Head(builder, config, target, has, max_model_len)
