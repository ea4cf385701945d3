"""Executes the steps of pooling models: flat batch -> forward -> one vector for each text or each token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.layers.step_inputs import StepInputs
from quire.messages.pooling_params import PoolingParams
from quire.messages.step import ModelRunnerOutput, NewRequest, Pooled, SchedulerOutput, TokenMasks
from quire.models.pooler import Pooler
from quire.worker.input_batch import FlatBatch
from quire.worker.runner import Runner, RunnerParts


@dataclass
class _Launched:
    step: SchedulerOutput
    results: list[Tensor]  # of each request


class PoolingRunner(Runner[_Launched]):
    """Each step computes whole texts, so the hidden states of a text are complete when it ends."""

    pools = True

    def __init__(self, parts: RunnerParts, pooler: Pooler) -> None:
        super().__init__(parts)
        self.pooler = pooler
        self._params: dict[int, PoolingParams] = {}  # by row

    def install(self, new: NewRequest) -> None:
        self.check_kind(new)
        assert new.pooling_params is not None
        self.batch.install(new)
        self._params[new.row] = new.pooling_params

    def launch(self, flat: FlatBatch, step: SchedulerOutput) -> _Launched:
        lengths = np.diff(flat.query_start_loc).astype(np.int64)
        texts = {"starts": flat.query_start_loc[:-1].astype(np.int64), "lengths": lengths}
        inputs, on_device = self.staging.stage(flat, self.forward.fit(flat.size), step, texts)
        hidden = self.forward(inputs)[: len(flat.positions)]
        return _Launched(step, self._pool(hidden, flat, on_device["starts"], on_device["lengths"]))

    def results_of(self, launched: _Launched) -> Sequence[Tensor]:
        return launched.results

    def _pool(self, hidden: Tensor, flat: FlatBatch, starts: Tensor, lengths: Tensor) -> list[Tensor]:
        params = [self._params[row] for row in flat.rows.tolist()]
        by_token = [p.task in ("token_embed", "token_classify") for p in params]
        pooler = self.pooler
        results = list[Tensor]()
        if pooler.spec.of_each_token or not any(by_token):
            pooled = pooler(hidden, starts, lengths)
            if pooler.spec.of_each_token:
                results = list(torch.split(pooled, np.diff(flat.query_start_loc).tolist()))
            elif all(p.use_activation is None and p.dimensions is None for p in params):
                return list(pooler.finish(pooled, None, None))
            else:
                results = list(pooled)
        else:  # the hidden states themselves, of some or all texts
            pooled = hidden if all(by_token) else pooler(hidden, starts, lengths)
            parts = torch.split(hidden.float(), np.diff(flat.query_start_loc).tolist())
            results = [
                part if tokens else pooled[i] for i, (part, tokens) in enumerate(zip(parts, by_token, strict=True))
            ]
        return [pooler.finish(r, p.use_activation, p.dimensions) for r, p in zip(results, params, strict=True)]

    @torch.inference_mode()
    def sample(self, step_id: int, masks: TokenMasks | None = None) -> Callable[[], ModelRunnerOutput]:
        launched = self._launched.pop(step_id)
        if isinstance(launched, ModelRunnerOutput):
            return lambda: launched
        refusals = self._refused.pop(step_id, {})
        shapes = [list(result.shape) for result in launched.results]
        read = self.device.download(torch.cat([result.reshape(-1) for result in launched.results]))

        def output() -> ModelRunnerOutput:
            [values] = read()
            flat = values.numpy()
            at = 0
            pooled = {}
            for index, shape in enumerate(shapes):
                size = int(np.prod(shape))
                pooled[index] = Pooled(shape, flat[at : at + size].tobytes())
                at += size
            return ModelRunnerOutput(step_id, [[]] * len(shapes), refusals=refusals, pooled=pooled)

        return output

    @torch.inference_mode()
    def run(self, inputs: StepInputs, rows: int) -> None:
        starts = inputs.query_start_loc.long()
        self.pooler(self.forward(inputs), starts[:-1], starts.diff())
