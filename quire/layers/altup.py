"""AltUp (arXiv:2301.13310) and LAuReL (arXiv:2411.07501) as in Gemma 3n: several streams, of which a layer computes one
and predicts the others."""

import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.linear import ReplicatedLinear
from quire.layers.norm import make_norm
from quire.layers.specs import AltUpSpec, NormSpec

_LEAST = 1e-5  # of the mean square of a projected stream


class Streams:
    """Makes the streams from embeddings, and one vector of the streams after the last layer. names: the names of
    altup_split and altup_merge, with {n} for the stream."""

    def __init__(self, builder: Builder, spec: AltUpSpec, hidden: int, names: dict[str, str]) -> None:
        others = range(spec.streams - 1)
        self.splits, self.merges = (
            [ReplicatedLinear(builder, names[role].replace("{n}", str(n)), hidden, hidden) for n in others]
            for role in ("altup_split", "altup_merge")
        )

    def split(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, streams * hidden]"""
        return torch.cat((x, *(self._resized(linear(x), x) for linear in self.splits)), 1)

    def merge(self, streams: Tensor) -> Tensor:
        """streams: [tokens, streams * hidden] -> [tokens, hidden]"""
        first, *others = streams.chunk(1 + len(self.merges), 1)
        pairs = zip(self.merges, others, strict=True)
        return torch.stack((first, *(self._resized(linear(x), first) for linear, x in pairs))).mean(0)

    @staticmethod
    def _resized(x: Tensor, like: Tensor) -> Tensor:
        """Return x with the root mean square of `like`."""
        size = like.square().mean(-1, keepdim=True).sqrt()
        return x * size / x.square().mean(-1, keepdim=True).clamp(min=_LEAST).sqrt()


class AltUp:
    """Predicts the streams after a layer, and corrects them by the computed one, which is the first. names: the names
    of altup_router, altup_router_norm, altup_predict, altup_correct and altup_scale."""

    def __init__(self, builder: Builder, spec: AltUpSpec, hidden: int, norm: NormSpec, names: dict[str, str]) -> None:
        count = spec.streams
        self.count = count
        self.hidden = hidden
        self.norm = make_norm(builder, names["altup_router_norm"], hidden, norm)
        self.router = ReplicatedLinear(builder, names["altup_router"], hidden, count)
        self.prediction = ReplicatedLinear(builder, names["altup_predict"], count, count * count)
        self.correction = ReplicatedLinear(builder, names["altup_correct"], count, count)
        self.scale = builder.whole(names["altup_scale"], hidden)
        self.scales = spec.scales_correction

    def predict(self, streams: Tensor) -> Tensor:
        """streams: [tokens, streams * hidden] -> [tokens, streams, hidden]"""
        x = streams.view(len(streams), self.count, self.hidden)
        coefficients = self.prediction(self._modalities(x[:, 0])).view(-1, self.count, self.count)
        return x + coefficients @ x

    def correct(self, predicted: Tensor, computed: Tensor) -> tuple[Tensor, Tensor]:
        """computed: the first stream, [tokens, hidden] -> the streams, [tokens, streams, hidden], and the input of the
        branch with the layer's own embeddings, [tokens, hidden]"""
        coefficients = self.correction(self._modalities(computed)) + 1
        streams = predicted + (computed - predicted[:, 0])[:, None] * coefficients[..., None]
        first = streams[:, 0]
        return streams, first * self.scale if self.scales else first

    def _modalities(self, x: Tensor) -> Tensor:
        return torch.tanh(self.router(self.norm(x.contiguous()) * self.hidden**-1.0).float()).to(x.dtype)


class Laurel:
    """x plus the norm of a low-rank product of x. names: the names of laurel_left, laurel_right and laurel_norm."""

    def __init__(self, builder: Builder, rank: int, hidden: int, norm: NormSpec, names: dict[str, str]) -> None:
        self.left = ReplicatedLinear(builder, names["laurel_left"], hidden, rank)
        self.right = ReplicatedLinear(builder, names["laurel_right"], rank, hidden)
        self.norm = make_norm(builder, names["laurel_norm"], hidden, norm)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> the same"""
        return x + self.norm(self.right(self.left(x)))
