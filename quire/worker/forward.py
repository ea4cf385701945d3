"""The forward: computes hidden states from the inputs of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quire.attention.base import CacheBackend
from quire.layers.forward_state import ForwardState
from quire.layers.step_inputs import StepInputs, StepSize
from quire.models.model import Model
from quire.parallel.experts import StepCapacity
from quire.parallel.pipeline import Pipe


@dataclass(frozen=True)
class ForwardParts:
    """The optional parts of a forward, in addition to a model and its backends.

    pipe: of a pipeline stage, None for a whole model. taps: the tensors that receive hidden states of chosen layers,
    see Model.forward. layer_done: see ForwardState; recorded, captured and overlapped forwards do not call it.
    compiled: the model's forward as compiled by torch.compile, None for the model's own. capacity: of the exchanges
    with other replicas, None if it is not fixed.
    """

    pipe: Pipe | None = None
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    layer_done: Callable[[], None] | None = None
    compiled: Callable[..., Tensor] | None = None
    capacity: StepCapacity | None = None


_NO_PARTS = ForwardParts()


class Forward:
    """The eager forward: calls every kernel from Python in each step."""

    def __init__(self, model: Model, backends: Sequence[CacheBackend], parts: ForwardParts = _NO_PARTS) -> None:
        """backends: one for each KV group."""
        self.model = model
        self.backends = backends
        self.pipe = parts.pipe
        self.taps = dict(parts.taps)
        self.layer_done = parts.layer_done
        self.capacity = parts.capacity
        self._compiled = parts.compiled

    def compute(self, x: Tensor, state: ForwardState, rows: Tensor | None, taps: Mapping[int, Tensor]) -> Tensor:
        """Run the model's layers, see Model.forward; compiled by torch.compile if that is enabled."""
        return (self._compiled or self.model.forward)(x, state, rows, taps)

    def fit(self, size: StepSize) -> StepSize:
        """Return the size to which a step of this size is padded. Call it once before each step: ranks that share
        experts agree on the capacity of their exchanges."""
        self.agree(size)
        return size

    def agree(self, size: StepSize) -> StepSize:
        """Agree with the ranks that share experts on the capacity of a step, see StepCapacity. Returns a size that
        covers the steps of all ranks."""
        if self.capacity is None:
            return size
        tokens, per_request = self.capacity.agree(size.tokens, size.tokens_per_request)
        return size._replace(tokens=tokens, tokens_per_request=per_request)

    def __call__(self, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        """Return the hidden states [tokens, hidden], or only those of the tokens `rows`. Valid until the next call.

        A pipeline stage receives the result of the previous stage, and sends its own to the next one.
        """
        hidden = self.run(inputs, rows)
        if self.pipe is not None and not self.pipe.is_last:
            self.pipe.send(hidden)
        return hidden

    def run(self, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        """Like `__call__`, without sending."""
        return self.layers(self.embed(inputs), inputs, rows)

    def logits(self, hidden: Tensor, inputs: StepInputs, tokens: Tensor) -> Tensor:
        """Return the logits of some hidden states of a step. tokens: their indices among the tokens of the step."""
        slots = inputs.slots
        return self.model.logits(hidden, slots if slots is None else slots[tokens])

    def embed(self, inputs: StepInputs) -> Tensor:
        """Return the input of the first layer, [own tokens, hidden]. Recorded steps and CUDA graphs start after it."""
        if self.pipe is None or self.pipe.is_first:
            given = inputs.input_ids, inputs.positions, inputs.slots
            return self.model.embed(*given) if inputs.media is None else self.model.embed_with(inputs.media, *given)
        target = self.model.kernels.target
        return self.pipe.receive(inputs.size.tokens, target.dtype, target.device)

    def layers(self, x: Tensor, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        """Return the hidden states, as `__call__` does. x: the result of `embed`."""
        return self.compute(x, self.state(inputs, self.layer_done), rows, self.taps)

    def state(self, inputs: StepInputs, layer_done: Callable[[], None] | None = None) -> ForwardState:
        rotary = [table(inputs.rotary_positions) for table in self.model.rotary]
        return ForwardState(inputs, rotary, self.plan(inputs), layer_done, slots=inputs.slots)

    def plan(self, inputs: StepInputs, over: Sequence[Any] | None = None) -> list[Any]:
        """Return the attention plan of each KV group. over: plans of another step of the same size, to be
        overwritten."""
        groups = zip(self.backends, inputs.layouts(), over or [None] * len(self.backends), strict=True)
        return [backend.plan(layout, plan) for backend, layout, plan in groups]
