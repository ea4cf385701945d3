"""The activation xIELU (arXiv:2411.13010), whose two slopes are learned in each layer."""

from torch import Tensor
from torch.nn import functional

from quire.layers.build import Builder

BETA = 0.5  # in all published models


class XIELU:
    """The op xielu with the slopes of a layer. name: the prefix of the checkpoint's alpha_p and alpha_n. Each has one
    element, whose softplus gives a slope."""

    def __init__(self, builder: Builder, name: str) -> None:
        self.kernels = builder.kernels
        self.alphas = builder.whole(f"{name}.alpha_p", 1), builder.whole(f"{name}.alpha_n", 1)
        self._slopes: tuple[Tensor, Tensor] | None = None
        builder.when_loaded(self._find_slopes)

    def _find_slopes(self) -> None:
        positive, negative = (functional.softplus(alpha.float()) for alpha in self.alphas)
        self._slopes = positive, negative + BETA

    def __call__(self, x: Tensor) -> Tensor:
        assert self._slopes is not None, "load the weights first"
        out: Tensor = self.kernels.xielu(x, *self._slopes)
        return out
