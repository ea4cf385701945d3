"""The common base of recurrent layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.attention.states import StateBackend
from quire.layers.attention_spec import HeadShare, LayerPlace
from quire.layers.build import Builder
from quire.layers.linear import RowParallelLinear
from quire.layers.state_spec import RecurrentSpec
from quire.ops.reference.states import Pages

Part = tuple[int, int]  # the outputs start ... stop - 1 of a tensor


class Recurrent:
    """A layer that keeps a state for each request instead of keys and values. Each rank has some of its heads."""

    pages: Pages | None = None  # set once the size of the cache is known

    def __init__(
        self, builder: Builder, spec: RecurrentSpec, names: dict[str, str], place: LayerPlace, bias: bool = False
    ) -> None:
        """bias: whether the output has a bias."""
        self.share = HeadShare.of(spec, builder.tensor_group)
        self.place = place
        self.kernels = builder.kernels
        self.num_heads = len(self.share.heads)
        self.num_kv_heads = len(self.share.kv_heads)
        self.key_dim = spec.key_dim
        self.value_dim = spec.value_dim
        self.keys = self.num_kv_heads * spec.key_dim
        self.values = self.num_heads * spec.value_dim
        inner = (self.share.heads.start * spec.value_dim, self.share.heads.stop * spec.value_dim)
        self.out = RowParallelLinear(
            builder,
            names["state_out"],
            spec.num_heads * spec.value_dim,
            inner,
            spec.hidden_size,
            bias,
            is_copy=self.share.is_copy,
        )

    def bind(self, backend: StateBackend, cache: Tensor) -> None:
        self.pages = Pages.of(cache, backend.shape, backend.drafts)

    def of_heads(self, size: int, start: int = 0) -> Part:
        """Return this rank's part of outputs with `size` elements per head that begin at `start`."""
        return start + self.share.heads.start * size, start + self.share.heads.stop * size

    def of_key_heads(self, size: int, start: int = 0) -> Part:
        return start + self.share.kv_heads.start * size, start + self.share.kv_heads.stop * size

    def convolve(self, builder: Builder, pieces: Sequence[tuple[str, int, Part]], width: int) -> None:
        """Create the weight of the convolution, [width, channels], see `vector`."""
        self.conv = self.vector(builder, pieces, 1, width)
        builder.when_loaded(self._transpose)

    def _transpose(self) -> None:
        self.conv = self.conv[:, 0].T.contiguous()

    @staticmethod
    def vector(builder: Builder, pieces: Sequence[tuple[str, int, Part]], *inner: int) -> Tensor:
        """Return rows of checkpoint tensors, in float32: [rows, *inner]. pieces: the name of a tensor, its number of
        rows, and the wanted rows."""
        target = builder.parameter(sum(stop - start for _, _, (start, stop) in pieces), *inner, dtype=torch.float32)
        at = 0
        for name, rows, (start, stop) in pieces:
            builder.part(name, target[at : (at := at + stop - start)], (rows, *inner), slice(start, stop))
        return target


def by_head(x: Tensor, heads: int, dim: int) -> Tensor:
    """[tokens, heads * dim] -> [tokens, heads, dim], a view"""
    return x.as_strided((len(x), heads, dim), (x.stride(0), dim, 1), x.storage_offset())
