"""Norm layers."""

from torch import Tensor

from quire.layers.build import Builder


class RMSNorm:
    """Root-mean-square norm over the last dimension."""

    def __init__(self, builder: Builder, name: str, size: int, eps: float) -> None:
        self.kernels = builder.kernels
        self.weight = builder.whole(f"{name}.weight", size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.kernels.rms_norm(x, self.weight, self.eps)
        return out

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); without a residual stream yet, x starts it."""
        if residual is None:
            return self(x), x
        normed, residual = self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
        assert residual is not None
        return normed, residual
