"""The MLP speculator (arXiv:2404.19124): a state that starts as a hidden state and is updated with each guessed
token."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.embedding import LMHead, VocabParallelEmbedding
from quire.layers.linear import ReplicatedLinear
from quire.layers.mlp import activation
from quire.layers.norm import RMSNorm
from quire.layers.specs import NormSpec
from quire.models.decoder import Decoder
from quire.models.heads.head import Choose
from quire.models.spec import HfConfig

Layer = TypeVar("Layer")
_EPS = 1e-6


class BiasedRMSNorm(RMSNorm):
    def __init__(self, builder: Builder, name: str, size: int) -> None:
        super().__init__(builder, name, size, NormSpec("rms", _EPS))
        self.bias = builder.whole(f"{name}.bias", size)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + self.bias


class MLPSpeculator:
    """A StateHead. Draft i is chosen by H_i s_i, where s_i = gelu(norm_i(a P_i s_(i-1) + b E_i[token i - 1])).

    s_(-1) is the target model's hidden state and token -1 the newest token. The factors a and b are chosen so that the
    hidden state is expected to contribute half of the last state's magnitude. If the checkpoint ties its weights, all
    drafts share E, norm and H, and all but the first share P.
    """

    ignored: tuple[str, ...] = (r"(^|\.)(emb|proj|ln|head)\.\d+\.(weight|bias)$",)  # second copies of tied weights

    def __init__(
        self, builder: Builder, drafts: int, vocab_size: int, hidden: int, inner: int, tied: bool, scaled: bool
    ) -> None:
        """inner: the width of the states. scaled: the hidden state is normed first."""
        self.most = drafts
        self.kernels = builder.kernels

        def layers(make: Callable[[str, int], Layer], role: str, first: int = 0) -> list[Layer]:
            if tied:
                return [make(f"speculator.{role}.{first}", first)] * (drafts - first)
            return [make(f"speculator.{role}.{i}", i) for i in range(first, drafts)]

        def linear(name: str, i: int) -> ReplicatedLinear:
            return ReplicatedLinear(builder, name, inner if i else hidden, inner)

        self.embeddings = layers(lambda name, i: VocabParallelEmbedding(builder, name, vocab_size, inner, False), "emb")
        self.projections = [linear("speculator.proj.0", 0), *(layers(linear, "proj", 1) if drafts > 1 else [])]
        self.norms = layers(lambda name, i: BiasedRMSNorm(builder, name, inner), "ln")
        self.heads = layers(lambda name, i: LMHead(builder, name, vocab_size, inner, None), "head")
        self.gelu = activation(builder.kernels, "gelu", gated=False)
        # The norm cancels any common factor of its input, so only b / a is needed.
        a = 0.5 ** (0.5 / drafts)
        self.weight = math.sqrt((1 - a**2) * inner / 2) / a
        self.scale: Tensor | None = None
        if scaled:
            self.scale = torch.full((hidden,), 0.5**0.5, dtype=torch.float32, device=builder.device)

    def draft(self, hidden: Tensor, ids: Tensor, count: int, choose: Choose) -> Tensor:
        """See StateHead."""
        state = hidden if self.scale is None else self.kernels.rms_norm(hidden, self.scale, _EPS)
        drafts: list[Tensor] = []
        for i in range(count):
            state = torch.add(self.projections[i](state), self.embeddings[i](ids), alpha=self.weight)
            state = self.gelu(self.norms[i](state))
            ids = choose(self.heads[i](state), i)
            drafts.append(ids)
        return torch.stack(drafts, dim=1)


def mlp_speculator(
    builder: Builder, config: HfConfig, target: Decoder, has: Callable[[str], bool], max_model_len: int
) -> MLPSpeculator:
    """The HeadMaker of IBM's accelerators. Raises ValueError if the head is not made for the target model."""
    for name, wanted in (("emb_dim", target.spec.hidden_size), ("vocab_size", target.vocab_size)):
        if config[name] != wanted:
            message = f"the MLP speculator is for a model with {name} {config[name]}, but the model has {wanted}"
            raise ValueError(message)
    inner = config.get("inner_dim") or config["emb_dim"]
    return MLPSpeculator(
        builder,
        config["n_predict"],
        target.vocab_size,
        config["emb_dim"],
        inner,
        tied=bool(config.get("tie_weights")),
        scaled=bool(config.get("scale_input")),
    )
