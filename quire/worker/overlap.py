"""Dual-batch overlap (--enable-dbo): a large step is divided into two halves, which alternate. While the tokens of one
half are in transit between ranks, the other half computes. DeepSeek-V3's inference does the same (arXiv:2412.19437).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quire.attention.base import CacheBackend
from quire.config.engine import ParallelConfig
from quire.layers.forward_state import pick
from quire.layers.step_inputs import StepInputs
from quire.models.model import Model
from quire.parallel.mesh import Communicator
from quire.parallel.step_halves import Halves
from quire.worker.forward import Forward, ForwardParts


class OverlappedForward(Forward):
    """Divides steps in which all ranks have enough tokens.

    The second half follows the first one through the layers: its attention in a layer runs after that of the first
    half, so it reads the keys that the first half has stored.
    """

    def __init__(
        self,
        model: Model,
        backends: Sequence[CacheBackend],
        parts: ForwardParts,
        halves: Halves,
        group: Communicator,
        options: ParallelConfig,
    ) -> None:
        """halves: the turns used by the model's layers. group: the ranks that exchange tokens, which divide the same
        steps."""
        super().__init__(model, backends, parts)
        self._halves = halves
        self._group = group
        self._fewest = options.dbo_prefill_token_threshold, options.dbo_decode_token_threshold

    def layers(self, x: Tensor, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        size = inputs.size
        enough = size.tokens >= max(2, self._fewest[size.tokens_per_request == 1])
        if not self._group.minimum(int(enough)):
            return super().layers(x, inputs, rows)
        unit = size.tokens_per_request or 1  # split between requests if they have equally many tokens
        middle = size.tokens // unit // 2 * unit
        if self.capacity is not None:
            self.capacity.tokens = 0  # it is that of whole steps
        parts = slice(0, middle), slice(middle, size.tokens)
        work = [partial(self._half, x[part], _part(inputs, part), part) for part in parts]
        return pick(torch.cat(self._halves.run(*work)), rows)

    def _half(self, x: Tensor, inputs: StepInputs, part: slice) -> Tensor:
        return self.compute(x, self.state(inputs), None, {layer: tap[part] for layer, tap in self.taps.items()})


def _part(inputs: StepInputs, part: slice) -> StepInputs:
    """Return the inputs of some tokens of a step. All its requests stay; those outside the part have no tokens."""
    bounds = inputs.query_start_loc
    tokens = part.stop - part.start
    own = inputs.of_tokens(
        lambda tensor, axis: tensor.narrow(axis, part.start, tokens), "embedding", "attention", "layers"
    )
    behind = (bounds[1:] - part.stop).clamp(min=0).minimum(bounds.diff())  # [requests]: tokens that come later
    return replace(
        inputs,
        size=inputs.size._replace(tokens=tokens),
        longest_prompt=0,
        query_start_loc=(bounds - part.start).clamp(0, tokens),
        seq_lens=inputs.seq_lens - behind,
        **own,
    )
