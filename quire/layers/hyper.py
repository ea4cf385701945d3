"""Hyper-connections (arXiv:2409.19606): several residual streams, from which each branch reads a weighted sum, and to
which its result is added with weights. The weights depend on the streams. In DeepSeek-V4, the streams are also mixed,
by a matrix whose rows and columns have sums of 1 (arXiv:2512.24880); in Hunyuan 4, they are not."""

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.specs import HyperSpec


class WeightsOfStreams:
    """Computes `kinds` weights of each stream from all of them, in float32, and the elements of `mixed` matrices that
    mix the streams. name: of the tensors, with {p} for fn, base and scale. eps: of the norm of the streams."""

    def __init__(
        self, builder: Builder, spec: HyperSpec, hidden: int, eps: float, name: str, kinds: int, mixed: int = 0
    ) -> None:
        self.spec = spec
        self.hidden = hidden
        self.eps = eps
        self.linear = builder.kernels.linear
        self.kinds = kinds
        outputs = kinds * spec.streams + mixed * spec.streams**2
        self.fn = builder.whole(name.replace("{p}", "fn"), outputs, spec.streams * hidden, dtype=torch.float32)
        self.base = builder.whole(name.replace("{p}", "base"), outputs, dtype=torch.float32)
        self.scale = builder.whole(name.replace("{p}", "scale"), kinds + mixed, dtype=torch.float32)
        builder.when_loaded(self._pack)

    def _pack(self) -> None:
        streams = self.spec.streams
        counts = [streams] * self.kinds + [streams**2] * (len(self.scale) - self.kinds)
        self.factors = torch.cat([self.scale[i].repeat(count) for i, count in enumerate(counts)])
        pack = getattr(self.linear, "pack", None)
        self.packed = self.fn if pack is None else pack(self.fn)

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [tokens, streams * hidden] -> weights from 0 to 1, [tokens, kinds, streams], and the other outputs"""
        wide = x.float()
        size = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        outputs = self.linear(wide, self.packed, None) * size
        outputs = outputs * self.factors + self.base
        ends = self.kinds * self.spec.streams
        return torch.sigmoid(outputs[:, :ends]).view(len(x), self.kinds, self.spec.streams), outputs[:, ends:]

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
        weights, _ = self.weights.of(x)
        return self.weights.sum(x, weights[:, 0]), self.spec.magnitude * weights[:, 1] + self.spec.eps

    def add(self, x: Tensor, out: Tensor, weights: Tensor) -> Tensor:
        """x: the streams, [tokens, streams * hidden]; out: the branch's result, [tokens, hidden] -> the streams"""
        streams = x.view(len(x), self.spec.streams, out.shape[1]).float()
        return (streams + weights[..., None] * out.float()[:, None]).to(x.dtype).flatten(1)


class MixingConnection:
    """The streams around one branch, which are also mixed. name: see WeightsOfStreams."""

    def __init__(self, builder: Builder, spec: HyperSpec, hidden: int, eps: float, name: str) -> None:
        self.spec = spec
        self.weights = WeightsOfStreams(builder, spec, hidden, eps, name, 2, 1)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [tokens, streams * hidden] -> the branch's input, [tokens, hidden]; and the weights of its result, and the
        matrix that mixes the streams, [tokens, streams * (1 + streams)]"""
        weights, rest = self.weights.of(x)
        count = self.spec.streams
        matrix = self._balanced(rest.view(-1, count, count).softmax(-1) + self.spec.eps)
        return self.weights.sum(x, weights[:, 0]), torch.cat(
            (self.spec.magnitude * weights[:, 1], matrix.flatten(1)), 1
        )

    def _balanced(self, matrix: Tensor) -> Tensor:
        """Divide columns and rows by their sums in turn (Sinkhorn and Knopp, 1967)."""
        matrix = matrix / (matrix.sum(-2, keepdim=True) + self.spec.eps)
        for _ in range(self.spec.balances - 1):
            matrix = matrix / (matrix.sum(-1, keepdim=True) + self.spec.eps)
            matrix = matrix / (matrix.sum(-2, keepdim=True) + self.spec.eps)
        return matrix

    def add(self, x: Tensor, out: Tensor, weights: Tensor) -> Tensor:
        """x: the streams, [tokens, streams * hidden]; out: the branch's result, [tokens, hidden]; weights: see `read`
        -> the streams"""
        count = self.spec.streams
        streams = x.view(len(x), count, out.shape[1]).float()
        matrix = weights[:, count:].view(-1, count, count)
        mixed = torch.matmul(matrix.transpose(1, 2), streams)
        return (mixed + weights[:, :count, None] * out.float()[:, None]).to(x.dtype).flatten(1)


class HyperStreams:
    """Makes the streams from embeddings, and their weighted sum after the last layer. name: see WeightsOfStreams; None
    for the mean instead."""

    def __init__(self, builder: Builder, spec: HyperSpec, hidden: int, eps: float, name: str | None) -> None:
        self.count = spec.streams
        self.weights = None if name is None else WeightsOfStreams(builder, spec, hidden, eps, name, 1)

    def split(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, streams * hidden]"""
        return x.repeat(1, self.count)

    def merge(self, streams: Tensor) -> Tensor:
        """streams: [tokens, streams * hidden] -> [tokens, hidden]"""
        if self.weights is None:
            by_stream = streams.view(len(streams), self.count, streams.shape[1] // self.count)
            return by_stream.float().mean(1).to(streams.dtype)
        weights, _ = self.weights.of(streams)
        return self.weights.sum(streams, weights[:, 0])
