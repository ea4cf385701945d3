"""Executes the steps of all pipeline stages except the last, which samples and sends the tokens to the others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from quire.layers.step_inputs import StepInputs
from quire.messages.step import ModelRunnerOutput, NewRequest, SchedulerOutput, TokenMasks
from quire.sampling.logits_processors import LogitsProcessors
from quire.worker.input_batch import FlatBatch
from quire.worker.runner import Runner, RunnerParts

_NOT_KEPT = -1  # replaces a token that the last stage has sampled, but not kept


@dataclass
class _Launched:
    """A step whose forward has been launched. See ModelRunner."""

    flat: FlatBatch
    place_rows: Tensor
    place_positions: Tensor
    requests: dict[str, Tensor] | None


class StageRunner(Runner[_Launched]):
    """Runs the layers of its stage. The tokens sampled by the last stage arrive later, through `take`: no step contains
    a request before its last tokens are known."""

    def __init__(self, parts: RunnerParts, processors: LogitsProcessors | None) -> None:
        """processors: the same as in the last stage, since every stage must refuse the same requests. None if the model
        pools."""
        super().__init__(parts)
        self.processors = processors
        self.pools = processors is None

    def install(self, new: NewRequest) -> None:
        self.check_kind(new)
        self.batch.install(new)
        self.adapters.install(new)
        if self.processors is not None:
            self.processors.add(new.row, new)

    def launch(self, flat: FlatBatch, step: SchedulerOutput) -> _Launched:
        extra = {"place_rows": flat.place_rows, "place_tokens": flat.place_tokens}
        if flat.has_drafts:
            extra |= {"draft_rows": flat.rows, "num_places": flat.num_places, "place_start_loc": flat.place_start_loc}
        inputs, on_device = self.staging.stage(flat, self.forward.fit(flat.size), step, extra)
        self.forward(inputs)
        self.batch.expect(flat)
        positions = torch.from_numpy(flat.place_positions)
        if self.device.is_async:  # the host's positions are upper bounds there
            positions = inputs.positions[on_device["place_tokens"]]
        return _Launched(flat, on_device["place_rows"], positions, on_device if flat.has_drafts else None)

    @torch.inference_mode()
    def take(self, step_id: int, sampled: Sequence[Sequence[int]]) -> None:
        """Store the tokens that the last stage has sampled and kept for each request of a submitted step."""
        launched = self._launched.pop(step_id)
        if isinstance(launched, ModelRunnerOutput) or self.pools or not len(launched.flat.place_rows):
            return
        flat = launched.flat
        columns = zip(sampled, flat.num_places.tolist(), strict=True)
        tokens = np.array([*chain(*([*kept, *[_NOT_KEPT] * (places - len(kept))] for kept, places in columns))])
        on_device = self.device.upload({"tokens": tokens})["tokens"]
        self.staging.sampled(launched.place_rows, launched.place_positions, on_device, launched.requests)
        self.batch.fill(flat, tokens, np.array([*map(len, sampled)]) if flat.has_drafts else None)

    def sample(self, step_id: int, masks: TokenMasks | None = None) -> Callable[[], ModelRunnerOutput]:
        """End a dummy step, for which the last stage sends nothing."""
        launched = self._launched[step_id]
        if isinstance(launched, ModelRunnerOutput):
            self._launched.pop(step_id)
            return lambda: launched
        self.take(step_id, [[0] * places for places in launched.flat.num_places.tolist()])
        return lambda: ModelRunnerOutput(step_id)

    def run(self, inputs: StepInputs, rows: int) -> None:
        self.forward(inputs)
