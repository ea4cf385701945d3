"""The layers of encoders. Every rank has a full copy: an encoder is small compared with its language model."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.linear import Adapters, LinearShape, adapters_of
from quire.layers.specs import OutputPart

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_fast": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


class Linear:
    def __init__(
        self,
        builder: Builder,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool = True,
        kernel: Sequence[int] = (),
        takes_adapters: bool = False,
    ) -> None:
        """kernel: further dimensions of the checkpoint's weight, if it is a convolution over non-overlapping patches.
        in_features: all values of a patch. takes_adapters: whether low-rank adapters can change the layer."""
        rest = 1
        for size in kernel:
            rest *= size
        weight = builder.whole(f"{name}.weight", out_features, in_features // rest, *kernel)
        self.weight = weight.view(out_features, in_features)
        self.bias = builder.whole(f"{name}.bias", out_features) if bias else None
        self.adapters = Adapters()
        if takes_adapters:
            part = OutputPart(name, out_features, 0, out_features)
            self.adapters = adapters_of(builder, LinearShape((part,), in_features, 0, in_features))

    def __call__(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """x: [..., in_features] -> [..., out_features]. slots: of the adapters, [rows of x]; None if there are none."""
        out = F.linear(x, self.weight, self.bias)
        if slots is None:
            return out
        return self.adapters.add(out.flatten(0, -2), x.flatten(0, -2), slots).view(out.shape)


class LayerNorm:
    def __init__(self, builder: Builder, name: str, size: int, eps: float) -> None:
        self.weight, self.bias = builder.whole(f"{name}.weight", size), builder.whole(f"{name}.bias", size)
        self.size = size
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)


class RMSNorm:
    def __init__(self, builder: Builder, name: str, size: int, eps: float, offset: float = 0.0) -> None:
        """offset: added to the checkpoint's weight."""
        self.weight = builder.whole(f"{name}.weight", size)
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (normed * (self.weight.float() + self.offset)).to(x.dtype)
        return self.weight * normed.to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float | None = None) -> Tensor:
    """Attention of all tokens to all tokens of each sequence. q, k, v: [sequences, tokens, heads * dim]"""
    q, k, v = (x.view(*x.shape[:2], heads, -1).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [patches, heads, dim]; cos, sin: [patches, 1, dim], float32"""
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (x.float() * cos + turned * sin).to(x.dtype)


def patches(pixels: Tensor, size: int) -> Tensor:
    """[pictures, 3, height, width] -> [pictures, rows, columns, 3 * size * size], in the order of a convolution."""
    count, channels, height, width = pixels.shape
    cut = pixels.view(count, channels, height // size, size, width // size, size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(count, height // size, width // size, channels * size * size)
