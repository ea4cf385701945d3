"""Norm layers. All of them compute in float32 and return their input's type."""

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.specs import NormSpec
from quire.ops import Kernels
from quire.ops.reference.quantized import RoundedRows


class Norm:
    """Norm over the last dimension. The base class is the identity, used where a model has no norm."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual). Both arguments may be overwritten. If residual is None, x starts
        the stream."""
        residual = x if residual is None else self.kernels.add(x, residual, residual)
        return self(residual), residual


class RMSNorm(Norm):
    """Root-mean-square norm (arXiv:1910.07467)."""

    def __init__(self, builder: Builder, name: str, size: int, spec: NormSpec) -> None:
        self.kernels = builder.kernels
        self.eps = spec.eps
        dtype = torch.float32 if spec.wide else None
        if not spec.affine:
            self.weight = builder.parameter(size, dtype=dtype)
            builder.when_loaded(lambda: self.weight.fill_(1))  # type: ignore[arg-type]
            return
        self.weight = builder.whole(f"{name}.weight", size, dtype=dtype)
        if spec.offset:
            builder.when_loaded(lambda: self.weight.add_(spec.offset))  # type: ignore[arg-type]
        if spec.scale != 1:
            builder.when_loaded(lambda: self.weight.mul_(spec.scale))  # type: ignore[arg-type]

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.kernels.rms_norm(x, self.weight, self.eps)
        return out

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self(x), x
        normed, residual = self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
        assert residual is not None
        return normed, residual


class RoundingNorm:
    """An RMSNorm whose results are rounded to 8 bits for the only product that reads them."""

    def __init__(self, norm: RMSNorm, code: torch.dtype) -> None:
        self.norm = norm
        self.code = code

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor | RoundedRows, Tensor]:
        """See Norm.add. If residual is None, the result is not rounded."""
        norm = self.norm
        if residual is None:
            return norm.add(x, residual)
        rounded: tuple[RoundedRows, Tensor]
        rounded = norm.kernels.add_rms_norm_rounded(x, residual, norm.weight, norm.eps, self.code)
        return rounded


class LayerNorm(Norm):
    """Layer norm, by mean and variance (arXiv:1607.06450)."""

    def __init__(self, builder: Builder, name: str, size: int, spec: NormSpec) -> None:
        self.kernels = builder.kernels
        self.eps = spec.eps
        self.weight = builder.whole(f"{name}.weight", size) if spec.affine else None
        self.bias = builder.whole(f"{name}.bias", size) if spec.bias and spec.affine else None
        if self.weight is not None and spec.offset:
            builder.when_loaded(lambda: self.weight.add_(spec.offset))  # type: ignore[union-attr, arg-type]

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.kernels.layer_norm(x, self.weight, self.bias, self.eps)
        return out

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self(x), x
        normed, residual = self.kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)
        assert residual is not None
        return normed, residual


def make_norm(builder: Builder, name: str | None, size: int, spec: NormSpec) -> Norm:
    """Return the norm called `name` in the checkpoint, or the identity if `name` is None."""
    if name is None:
        return Norm(builder.kernels)
    return (RMSNorm if spec.kind == "rms" else LayerNorm)(builder, name, size, spec)


def rounding(norm: Norm, code: torch.dtype | None) -> Norm | RoundingNorm:
    """Return a norm whose results are rounded to `code`, if that is possible and wanted."""
    return norm if code is None or type(norm) is not RMSNorm else RoundingNorm(norm, code)
