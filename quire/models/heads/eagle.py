"""The heads of EAGLE and EAGLE-2, which guess the target model's next hidden state."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.forward_state import ForwardState
from quire.layers.linear import ReplicatedLinear
from quire.models.decoder import Decoder
from quire.models.heads.eagle3 import Eagle3Head, eagle3
from quire.models.heads.eagle_layers import EagleLayers
from quire.models.spec import HfConfig


class EagleHead(EagleLayers):
    """EAGLE (arXiv:2401.15077) and EAGLE-2 (arXiv:2406.16858), which differ only in how drafts are searched for.

    The input at a position is a projection of the next token's embedding and the hidden state. The output replaces the
    target model's next final hidden state, so the embedding and the language-model head are those of the target model.
    Checkpoints may contain copies of them.
    """

    ignored = (*EagleLayers.ignored, r"^(model\.)?(embed_tokens|lm_head)\.weight$")

    def __init__(
        self, builder: Builder, config: HfConfig, target: Decoder, has: Callable[[str], bool], max_model_len: int
    ) -> None:
        size = config["hidden_size"]
        of_target = target.spec.hidden_size
        if size != of_target or size != (target.spec.embedding_size or size):
            raise ValueError(f"the EAGLE head has hidden_size={size}, but its target model has {of_target}")
        self.target = target
        self.embedding = target.embedding
        self.fc = ReplicatedLinear(builder, "fc", 2 * size, size, has("fc.bias"))
        super().__init__(builder, config, has, max_model_len, size)

    def combine(self, states: Sequence[Tensor]) -> Tensor:
        return states[0]

    def embed(self, ids: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat((self.embedding(ids), hidden), dim=-1))

    def forward(self, x: Tensor, state: ForwardState, wanted: Tensor | None = None) -> Tensor:
        x, residual = self.run(x, state, wanted)
        out: Tensor = self.kernels.add(x, residual, torch.empty_like(x))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden)


def eagle(
    builder: Builder, config: HfConfig, target: Decoder, has: Callable[[str], bool], max_model_len: int
) -> EagleHead | Eagle3Head:
    """The HeadMaker of checkpoints with the architecture name of a Llama or Qwen, for any version of EAGLE.

    Raises KeyError for a missing field, and ValueError for a field that does not fit the target model.
    """
    names = (f"{layer}.hidden_norm.weight" for layer in ("midlayer", "layers.0"))
    is_eagle3 = "draft_vocab_size" in config or any(map(has, names))
    return (eagle3 if is_eagle3 else EagleHead)(builder, config, target, has, max_model_len)
