"""Executes the steps of pooling models: flat batch -> forward -> one vector for each text or each token."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.layers.specs import TokenChoice
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


@dataclass
class _Texts:
    """lengths: of the texts, of whose tokens only the chosen ones count. arrays: starts and lengths, and the places of
    the tokens if some are left out."""

    lengths: npt.NDArray[np.int64]
    arrays: dict[str, npt.NDArray[np.int64]]


class PoolingRunner(Runner[_Launched]):
    """Each step computes whole texts, so the hidden states of a text are complete when it ends."""

    pools = True

    def __init__(self, parts: RunnerParts, poolers: Mapping[str, Pooler]) -> None:
        """poolers: of each task, the usual one first."""
        super().__init__(parts)
        self.poolers = poolers
        self._params: dict[int, PoolingParams] = {}  # by row

    def install(self, new: NewRequest) -> None:
        self.check_kind(new)
        assert new.pooling_params is not None
        self.batch.install(new)
        self._params[new.row] = new.pooling_params

    def launch(self, flat: FlatBatch, step: SchedulerOutput) -> _Launched:
        params = [self._params[row] for row in flat.rows.tolist()]
        poolers = dict.fromkeys(self.poolers[str(p.task)] for p in params)
        texts = {pooler: self._texts(flat, pooler.spec.tokens) for pooler in poolers}
        arrays = {f"{name}{i}": array for i, text in enumerate(texts.values()) for name, array in text.arrays.items()}
        inputs, on_device = self.staging.stage(flat, self.forward.fit(flat.size), step, arrays)
        hidden = self.forward(inputs)[: len(flat.positions)]
        results = {}
        for i, (pooler, text) in enumerate(texts.items()):
            here = {name: on_device[f"{name}{i}"] for name in text.arrays}
            results[pooler] = self._pool(pooler, hidden, text, here, params)
        return _Launched(step, [results[self.poolers[str(p.task)]][i] for i, p in enumerate(params)])

    def results_of(self, launched: _Launched) -> Sequence[Tensor]:
        return launched.results

    def _texts(self, flat: FlatBatch, tokens: TokenChoice | None) -> _Texts:
        starts = flat.query_start_loc[:-1].astype(np.int64)
        lengths = np.diff(flat.query_start_loc).astype(np.int64)
        if tokens is None:
            return _Texts(lengths, {"starts": starts, "lengths": lengths})
        ids = self.batch.token_ids[flat.token_rows, flat.positions]
        chosen = [start + _chosen(ids[start : start + n], tokens) for start, n in zip(starts, lengths, strict=True)]
        lengths = np.array([len(places) for places in chosen], np.int64)
        starts = np.cumsum(lengths) - lengths
        return _Texts(lengths, {"starts": starts, "lengths": lengths, "places": np.concatenate(chosen)})

    @staticmethod
    def _pool(
        pooler: Pooler, hidden: Tensor, texts: _Texts, on_device: Mapping[str, Tensor], params: Sequence[PoolingParams]
    ) -> Sequence[Tensor]:
        """Return the result of each text with this pooler, also of those for which another one is wanted."""
        if "places" in on_device:
            hidden = hidden[on_device["places"]]
        pooled = pooler(hidden, on_device["starts"], on_device["lengths"])
        if pooler.spec.of_each_token:
            results: Sequence[Tensor] = torch.split(pooled, texts.lengths.tolist())
        elif all(p.use_activation is None and p.dimensions is None for p in params):
            return list(pooler.finish(pooled, None, None))
        else:
            results = list(pooled)
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
        next(iter(self.poolers.values()))(self.forward(inputs), starts[:-1], starts.diff())


def _chosen(ids: npt.NDArray[np.int32], tokens: TokenChoice) -> npt.NDArray[np.int64]:
    """Return the places of the chosen tokens. ids: of a text."""
    places = np.arange(len(ids), dtype=np.int64)
    if tokens.ids:
        return np.concatenate([places[ids == token] for token in tokens.ids])
    begin = int(len(ids) > 0 and ids[0] == tokens.without_first)
    end = len(ids) - int(len(ids) > begin and ids[-1] == tokens.without_last)
    return places[begin:end]
