"""Attention over contexts that are divided among ranks: the common base of both ways to divide them."""

from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape
from quire.ops import Kernels
from quire.parallel.mesh import Communicator

Ints = npt.NDArray[np.integer]


class ContextAttention(AttentionBackend):
    """One rank's part of an attention that several ranks compute together. An inner backend computes this part.

    `store` and `attend` receive the keys, values and queries of the tokens that this rank computes, in all heads that
    tensor parallelism assigns to it. `plan` receives the layout of all tokens of the step. A rank without tokens in a
    step receives a dummy token, since layers need at least one: it is not stored, and its result is zero.

    how: a description of how contexts are divided, for the log and the fingerprint of the cache.
    """

    how: str

    def __init__(
        self,
        shape: AttentionShape,
        cp: Communicator,
        dcp: Communicator,
        choose: Callable[[AttentionShape], AttentionBackend],
        kernels: Kernels,
    ) -> None:
        """cp: the ranks that divide the tokens of a step. dcp: the ranks that hold the same KV heads and compute the
        same tokens. choose: creates the inner backend, which computes this rank's part."""
        super().__init__(shape)
        self.cp = cp
        self.dcp = dcp
        self.merge_partials = kernels.merge_partials
        self.inner = choose(self.inner_shape())
        self.name = f"{self.inner.name} {self.how}"
        self.capturable = self.inner.capturable
        self.cache_dtype = self.inner.cache_dtype
        self.block_shape = self.inner.block_shape

    @classmethod
    def unsupported(cls, shape: AttentionShape) -> str | None:
        return None  # the other backend decides

    @abstractmethod
    def inner_shape(self) -> AttentionShape:
        """The shape of the attention that this rank computes."""

    @abstractmethod
    def owners(self, positions: Ints) -> Ints:
        """Return the rank in the group cp that computes each of a step's tokens, [tokens].

        positions: the tokens' positions, [tokens].
        """


def packed(out: Tensor, lse: Tensor, memory: Tensor | None = None) -> Tensor:
    """Pack both into one tensor that can be sent as a whole: [..., dim + 1 or 2] in the type of `out`, with the bits of
    the lse at the end. memory: where to write it, None for new memory."""
    return torch.cat([out, lse[..., None].view(out.dtype)], dim=-1, out=memory)


def unpacked(both: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `packed`."""
    width = torch.float32.itemsize // both.dtype.itemsize
    return both[..., :-width], both[..., -width:].contiguous().view(torch.float32)[..., 0]
