"""Multi-token prediction: layers that were trained with the model to predict the token after the next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.layers.attention_spec import AttentionSpec, LatentAttentionSpec
from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState
from quire.layers.linear import ReplicatedLinear
from quire.layers.norm import make_norm
from quire.models.decoder import Decoder, LayerStack
from quire.models.spec import HfConfig, MixerSpec


@dataclass(frozen=True)
class Layout:
    """The location of the first such layer in a checkpoint. The names, after `prefix`, are without ".weight". layer:
    prefix of the decoder layer's own tensors. hidden_first: in the input of the projection, the hidden state comes
    before the embedding.
    """

    prefix: str
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    final_norm: str = "shared_head.norm"
    hidden_first: bool = False
    layer: str = ""


class PredictLayer(LayerStack):
    """An additional layer, built like the target model's last attention layer (DeepSeek-V3, arXiv:2412.19437, section
    2.2).

    From the hidden state h of a position and the embedding e of the next token, it computes

        h' = final_norm(layer(projection([embedding_norm(e), hidden_norm(h)])))

    from which the model's own language-model head predicts the token after the next. All hidden states are normed: the
    target model predicts from h, and h' replaces it for the next draft. If a model has several such layers, each for
    one draft, the first generates all drafts. Copies of the model's embedding and head in the checkpoint are not read.
    """

    taps: Sequence[int] = ()
    token_ids: Tensor | None = None
    mask: tuple[int, Tensor] | None = None
    ignored: tuple[str, ...]

    def __init__(
        self, builder: Builder, target: Decoder, has: Callable[[str], bool], max_model_len: int, layout: Layout
    ) -> None:
        """Raises ValueError if the checkpoint has no such layer."""
        spec = target.spec
        prefix = layout.prefix
        size = target.spec.hidden_size
        if not has(f"{prefix}{layout.hidden_norm}.weight"):
            raise ValueError(f"the checkpoint has no layer for multi-token prediction, {prefix}*")
        renamed = prefix + layout.layer
        names = {role: name and name.replace("model.layers.{i}.", renamed) for role, name in spec.names.items()}
        mixer = next(mixer for mixer in reversed(spec.mixers) if _attends_alone(mixer))
        one = replace(
            spec,
            num_layers=1,
            mixers=(mixer,),
            mlps=spec.mlps[-1:],
            windows=spec.windows[-1:],
            rotary=spec.rotary[-1:],
            names=names,
        )
        self.target = target
        self.hidden_first = layout.hidden_first
        self.embedding_norm = make_norm(builder, prefix + layout.embedding_norm, size, spec.norm)
        self.hidden_norm = make_norm(builder, prefix + layout.hidden_norm, size, spec.norm)
        self.projection = ReplicatedLinear(builder, prefix + layout.projection, 2 * size, size)
        super().__init__(builder, one, max_model_len)
        self.final_norm = make_norm(builder, prefix + layout.final_norm, size, spec.norm)
        place = prefix.replace(".", r"\.")
        self.ignored: tuple[str, ...] = (
            rf"^(?!{place})",
            rf"^{place}(embed_tokens|shared_head\.head)\.",
            r"rotary_emb\.inv_freq$",
        )

    def combine(self, states: Sequence[Tensor]) -> Tensor:
        return states[0]

    def embed(self, ids: Tensor, hidden: Tensor) -> Tensor:
        embedding = self.embedding_norm(self.target.embedding(ids))
        hidden = self.hidden_norm(hidden)
        return self.projection(torch.cat((hidden, embedding) if self.hidden_first else (embedding, hidden), dim=-1))

    def forward(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        return self.final_norm.add(*self.run(x, state, wanted))[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden)


def _attends_alone(mixer: MixerSpec | None) -> bool:
    """Whether it is attention that does not depend on the previous layer's selection."""
    if isinstance(mixer, LatentAttentionSpec):
        return not mixer.shares_selection
    return isinstance(mixer, AttentionSpec)


def deepseek_mtp(
    builder: Builder, config: HfConfig, target: Decoder, has: Callable[[str], bool], max_model_len: int
) -> PredictLayer:
    """The HeadMaker of DeepSeek-V3, R1 and GLM-4.5, which store this layer after their last layer."""
    return PredictLayer(builder, target, has, max_model_len, Layout(f"model.layers.{target.spec.num_layers}."))


def mimo_mtp(
    builder: Builder, config: HfConfig, target: Decoder, has: Callable[[str], bool], max_model_len: int
) -> PredictLayer:
    """The HeadMaker of Xiaomi's MiMo."""
    layout = Layout(
        "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", hidden_first=True
    )
    return PredictLayer(builder, target, has, max_model_len, layout)


def qwen_mtp(
    builder: Builder, config: HfConfig, target: Decoder, has: Callable[[str], bool], max_model_len: int
) -> PredictLayer:
    """The HeadMaker of Qwen3-Next and Qwen3.5. Their layer has attention, while most of the model's layers are
    recurrent."""
    layout = Layout("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", layer="layers.0.")
    return PredictLayer(builder, target, has, max_model_len, layout)
