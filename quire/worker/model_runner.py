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
from quire.sampling.logits_processors import Ints
from quire.sampling.logprobs import TopLogprobs
from quire.sampling.sampler import Sampler, SamplingBatch
from quire.worker.graphs import Graphs
from quire.worker.input_batch import FlatBatch, InputBatch

_SCORED_AT_ONCE = 256  # places of prompts whose logits are held at the same time


class ModelRunner:
    """Executes steps. The forward and the sampling of a step are two calls, in that order, step after step."""

    def __init__(
        self,
        model: Decoder,
        batch: InputBatch,
        backend: AttentionBackend,
        sampler: Sampler,
        graphs: Graphs | None = None,
    ) -> None:
        """graphs: to record steps with, None to call every kernel anew."""
        self.model, self.batch, self.backend, self.sampler = model, batch, backend, sampler
        self.graphs = graphs
        self.device = backend.shape.device
        self.processors = sampler.processors
        self._submitted: dict[int, tuple[FlatBatch, Tensor]] = {}  # by step id: the batch and its logits
        self._prompt_logprobs: dict[
            int, list[TopLogprobs]
        ] = {}  # by row: of the chunks so far, until they are reported

    @torch.inference_mode()
    def submit(self, step: SchedulerOutput) -> None:
        """Launch the forward. Raises RequestError, before anything is launched, if a request cannot be run."""
        for new in step.new_requests:
            try:
                self.batch.install(new)
                self.processors.add(new.row, new)
            except ValueError as error:
                raise RequestError(new.request_id, str(error)) from error
            self._prompt_logprobs.pop(new.row, None)
        self.batch.edit_block_tables(step)
        flat = self.batch.flatten(step)
        hidden = self._forward(flat)
        self._score_prompts(flat, hidden)
        last = (flat.query_start_loc[1:] - 1)[flat.samples]
        self._submitted[step.step_id] = flat, self.model.logits(hidden[self._upload(last.astype(np.int64))])

    @torch.inference_mode()
    def sample(self, step_id: int) -> ModelRunnerOutput:
        """Draw the tokens of a submitted step; they are the next step's inputs."""
        flat, logits = self._submitted.pop(step_id)
        rows = flat.rows[flat.samples]
        output = ModelRunnerOutput(step_id, [[] for _ in flat.rows])
        if len(rows):
            batch = self._sampling_batch(rows)
            tokens, logprobs = self.sampler(logits, batch)
            drawn = tokens.cpu().numpy()
            self.batch.append(rows, drawn)
            places = flat.samples.nonzero()[0].tolist()
            for place, token in zip(places, drawn.tolist(), strict=True):
                output.sampled_token_ids[place] = [token]
            if logprobs is not None and batch.num_logprobs is not None:
                logprobs = logprobs.cpu()
                asks = (batch.num_logprobs >= 0).nonzero()[0].tolist()
                for line, index in enumerate(asks):
                    width = 1 + int(batch.num_logprobs[index])
                    output.logprobs[places[index]] = logprobs.slice(line, line + 1, width).pack()
            if self._prompt_logprobs:
                self._report_prompts(rows.tolist(), places, output)
        return output

    def _score_prompts(self, flat: FlatBatch, hidden: Tensor) -> None:
        """Logprobs of the prompt tokens that follow those of this step, for rows that ask; kept until they sample."""
        batch = self.batch
        asks = (batch.num_prompt_logprobs[flat.rows] >= 0).nonzero()[0]
        if not len(asks):
            return
        rows, start = flat.rows[asks], flat.query_start_loc[asks]
        first = flat.seq_lens[asks] - (flat.query_start_loc[asks + 1] - start)
        counts = np.maximum(np.minimum(flat.seq_lens[asks], batch.num_prompt[rows] - 1) - first, 0)
        ends = np.cumsum(counts)
        if not ends[-1]:
            return
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)  # [places]: of the row's tokens in this step
        following = batch.token_ids[np.repeat(rows, counts), np.repeat(first, counts) + within + 1]
        index, tokens = self._upload(np.repeat(start, counts) + within), self._upload(following.astype(np.int64))
        most, parts = int(batch.num_prompt_logprobs[rows].max()), []
        for these, those in zip(*(torch.split(t, _SCORED_AT_ONCE) for t in (index, tokens)), strict=True):
            parts.append(TopLogprobs.of(self.sampler.score(self.model.logits(hidden[these])), those, most))
        scored = TopLogprobs.join(parts)
        widths = 1 + batch.num_prompt_logprobs[rows]
        for row, count, end, width in zip(*(a.tolist() for a in (rows, counts, ends, widths)), strict=True):
            self._prompt_logprobs.setdefault(row, []).append(scored.slice(end - count, end, width))

    def _report_prompts(self, rows: list[int], places: list[int], output: ModelRunnerOutput) -> None:
        """Of the rows that sample, each for the first time if it is in `_prompt_logprobs`."""
        for row, place in zip(rows, places, strict=True):
            if row in self._prompt_logprobs:
                output.prompt_logprobs[place] = TopLogprobs.join(self._prompt_logprobs.pop(row)).pack()
                self.batch.num_prompt_logprobs[row] = -1

    def _upload(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _forward(self, flat: FlatBatch) -> Tensor:
        """Hidden states: [tokens, hidden]"""
        positions = self._upload(flat.positions)
        x = self.model.embed(self._upload(flat.input_ids), positions)
        rotary = [table(positions) for table in self.model.rotary]
        query_start_loc, seq_lens = self._upload(flat.query_start_loc), self._upload(flat.seq_lens)
        layouts = [
            StepLayout(query_start_loc, seq_lens, self._upload(slots), self._upload(tables))
            for slots, tables in zip(flat.slot_mapping, flat.block_tables, strict=True)
        ]
        if len(x) == len(flat.rows) and self.graphs is not None and self.graphs.usable:
            return self.graphs.forward(x, positions, rotary, layouts)
        plans = [self.backend.plan(layout) for layout in layouts]
        return self.model.forward(x, ForwardState(positions, rotary, plans))

    def _sampling_batch(self, rows: Ints) -> SamplingBatch:
        """The parameters of the rows that sample; what no row asks for stays None."""
        batch = self.batch
        at = batch.sampling_rows(rows)
        num_logprobs = batch.num_logprobs[rows]
        sampling = SamplingBatch(None, rows=at, num_logprobs=num_logprobs if (num_logprobs >= 0).any() else None)
        temperature = batch.temperature[rows]
        if temperature.any():
            top_k, top_p, min_p = batch.top_k[rows], batch.top_p[rows], batch.min_p[rows]
            sampling.temperature = self._upload(temperature)
            sampling.seeds = self._upload(batch.seed[rows])
            sampling.positions = self._upload(at.num_output)
            sampling.top_k = self._upload(top_k) if (top_k < batch.vocab_size).any() else None
            sampling.top_p = self._upload(top_p) if (top_p < 1).any() else None
            sampling.min_p = self._upload(min_p) if min_p.any() else None
        return sampling
