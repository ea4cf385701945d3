"""What a token has between layers besides one residual stream.

The states of a hierarchical reasoning model (HRM, arXiv:2506.21734): a high and a low one, and a layer's input.
"""

import torch
from torch import Tensor

from quire.layers.build import Builder


class CycleStates:
    """Makes the states from embeddings, and returns the high one after the last layer. name: of the first low state."""

    def __init__(self, builder: Builder, hidden: int, name: str) -> None:
        self.low = builder.whole(name, hidden)

    def split(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> the high state, the low state and a layer's input, [tokens, 3 * hidden]"""
        return torch.cat((x, self.low.expand_as(x), x), 1)

    def merge(self, states: Tensor) -> Tensor:
        return states.chunk(3, 1)[0].contiguous()


class WithEmbeddings:
    """The stream, followed by the embeddings, which all layers read (Zamba2)."""

    def split(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, 2 * hidden]"""
        return torch.cat((x, x), 1)

    def merge(self, streams: Tensor) -> Tensor:
        return streams.chunk(2, 1)[0].contiguous()
