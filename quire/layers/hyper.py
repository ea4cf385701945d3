"""Independent hyper-connections (arXiv:2409.19606, as in Hunyuan 4): several residual streams, from which each branch
reads a weighted sum, and to which its result is added with weights. The weights depend on the streams."""

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.specs import HyperSpec


class WeightsOfStreams:
    """Computes `kinds` weights of each stream from all of them, in float32. name: of the tensors, with {p} for fn, base
    and scale. eps: of the norm of the streams."""

    def __init__(self, builder: Builder, spec: HyperSpec, hidden: int, eps: float, name: str, kinds: int) -> None:
        self.spec = spec
        self.hidden = hidden
        self.eps = eps
        self.linear = builder.kernels.linear
        outputs = kinds * spec.streams
        self.fn = builder.whole(name.replace("{p}", "fn"), outputs, spec.streams * hidden, dtype=torch.float32)
        self.base = builder.whole(name.replace("{p}", "base"), outputs, dtype=torch.float32)
        self.scale = builder.whole(name.replace("{p}", "scale"), kinds, dtype=torch.float32)
        builder.when_loaded(self._pack)

    def _pack(self) -> None:
        pack = getattr(self.linear, "pack", None)
        self.packed = self.fn if pack is None else pack(self.fn)

    def of(self, x: Tensor) -> Tensor:
        """x: [tokens, streams * hidden] -> from 0 to 1, [tokens, kinds, streams]"""
        wide = x.float()
        size = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        weights = (self.linear(wide, self.packed, None) * size).view(len(x), len(self.scale), self.spec.streams)
        return torch.sigmoid(weights * self.scale[:, None] + self.base.view(len(self.scale), -1))

    def sum(self, x: Tensor, weights: Tensor) -> Tensor:
        """x: [tokens, streams * hidden]; weights: [tokens, streams] -> [tokens, hidden]"""
        streams = x.view(len(x), self.spec.streams, self.hidden).float()
        return ((weights + self.spec.eps)[..., None] * streams).sum(1).to(x.dtype)


class HyperConnection:
    """The streams around one branch. name: see WeightsOfStreams."""

    def __init__(self, builder: Builder, spec: HyperSpec, hidden: int, eps: float, name: str) -> None:
        self.spec = spec
        self.weights = WeightsOfStreams(builder, spec, hidden, eps, name, 2)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [tokens, streams * hidden] -> the branch's input, [tokens, hidden], and the weights of its result,
        [tokens, streams]"""
        weights = self.weights.of(x)
        return self.weights.sum(x, weights[:, 0]), self.spec.magnitude * weights[:, 1] + self.spec.eps

    def add(self, x: Tensor, out: Tensor, weights: Tensor) -> Tensor:
        """x: the streams, [tokens, streams * hidden]; out: the branch's result, [tokens, hidden] -> the streams"""
        streams = x.view(len(x), self.spec.streams, out.shape[1]).float()
        return (streams + weights[..., None] * out.float()[:, None]).to(x.dtype).flatten(1)


class HyperStreams:
    """Makes the streams from embeddings, and their weighted sum after the last layer. name: see WeightsOfStreams."""

    def __init__(self, builder: Builder, spec: HyperSpec, hidden: int, eps: float, name: str) -> None:
        self.count = spec.streams
        self.weights = WeightsOfStreams(builder, spec, hidden, eps, name, 1)

    def split(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, streams * hidden]"""
        return x.repeat(1, self.count)

    def merge(self, streams: Tensor) -> Tensor:
        """streams: [tokens, streams * hidden] -> [tokens, hidden]"""
        return self.weights.sum(streams, self.weights.of(streams)[:, 0])
