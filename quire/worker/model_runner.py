"""Rows -> flat batch -> forward -> the rows that need logits -> sampled token ids."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, StepLayout
from quire.layers.attention import ForwardState
from quire.messages.engine import RequestError
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.models.decoder import Decoder
from quire.sampling.sampler import Sampler, SamplingBatch
from quire.worker.input_batch import FlatBatch, InputBatch, Ints


class ModelRunner:
    """Executes steps. The forward and the sampling of a step are two calls, in that order, step after step."""

    def __init__(self, model: Decoder, batch: InputBatch, backend: AttentionBackend, sampler: Sampler) -> None:
        self.model, self.batch, self.backend, self.sampler = model, batch, backend, sampler
        self.device = backend.shape.device
        self._submitted: dict[int, tuple[FlatBatch, Tensor]] = {}  # by step id: the batch and its logits

    @torch.inference_mode()
    def submit(self, step: SchedulerOutput) -> None:
        """Launch the forward. Raises RequestError, before anything is launched, if a request cannot be run."""
        for new in step.new_requests:
            try:
                self.batch.install(new)
            except ValueError as error:
                raise RequestError(new.request_id, str(error)) from error
        self.batch.edit_block_tables(step)
        flat = self.batch.flatten(step)
        hidden = self.model.forward(self._upload(flat.input_ids), self._forward_state(flat))
        last = (flat.query_start_loc[1:] - 1)[flat.samples]
        self._submitted[step.step_id] = flat, self.model.logits(hidden[self._upload(last.astype(np.int64))])

    @torch.inference_mode()
    def sample(self, step_id: int) -> ModelRunnerOutput:
        """Draw the tokens of a submitted step; they are the next step's inputs."""
        flat, logits = self._submitted.pop(step_id)
        rows = flat.rows[flat.samples]
        sampled: list[list[int]] = [[] for _ in flat.rows]
        if len(rows):
            tokens = self.sampler(logits, self._sampling_batch(rows)).cpu().numpy()
            self.batch.append(rows, tokens)
            for index, token in zip(flat.samples.nonzero()[0].tolist(), tokens.tolist(), strict=True):
                sampled[index] = [token]
        return ModelRunnerOutput(step_id, sampled)

    def _upload(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _forward_state(self, flat: FlatBatch) -> ForwardState:
        cos, sin = self.model.rotary(self._upload(flat.positions))
        query_start_loc, seq_lens = self._upload(flat.query_start_loc), self._upload(flat.seq_lens)
        plans = []
        for slots, tables in zip(flat.slot_mapping, flat.block_tables, strict=True):
            slots, tables = self._upload(slots), self._upload(tables)
            plans.append(self.backend.plan(StepLayout(query_start_loc, seq_lens, slots, tables)))
        return ForwardState(cos, sin, plans)

    def _sampling_batch(self, rows: Ints) -> SamplingBatch:
        """The parameters of the rows that sample; what no row asks for stays None."""
        batch = self.batch
        masked = self._stop_tokens_held_down(rows)
        temperature = batch.temperature[rows]
        if not temperature.any():
            return SamplingBatch(None, masked=masked)
        top_k, top_p, min_p = batch.top_k[rows], batch.top_p[rows], batch.min_p[rows]
        return SamplingBatch(
            temperature=self._upload(temperature),
            seeds=self._upload(batch.seed[rows]),
            positions=self._upload(batch.num_tokens[rows] - batch.num_prompt[rows]),
            top_k=self._upload(top_k) if (top_k < batch.vocab_size).any() else None,
            top_p=self._upload(top_p) if (top_p < 1).any() else None,
            min_p=self._upload(min_p) if min_p.any() else None,
            masked=masked,
        )

    def _stop_tokens_held_down(self, rows: Ints) -> list[tuple[Tensor, Tensor]]:
        """What would end a row that has not reached its min_tokens."""
        batch = self.batch
        short = batch.num_tokens[rows] - batch.num_prompt[rows] < batch.min_tokens[rows]
        masked = []
        for index in short.nonzero()[0].tolist():
            tokens = torch.tensor(batch.stop_token_ids[int(rows[index])], dtype=torch.int64, device=self.device)
            masked.append((torch.full_like(tokens, index), tokens))
        return masked
