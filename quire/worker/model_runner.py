"""Executes steps: batch rows -> flat batch -> forward -> logits of the places -> token ids."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import add

import numpy as np
import torch
from torch import Tensor

from quire.layers.forward_state import pick
from quire.layers.step_inputs import Array, StepInputs
from quire.messages.errors import error_text
from quire.messages.step import ModelRunnerOutput, NewRequest, SchedulerOutput, TokenMasks
from quire.observability.logging import logger
from quire.ops.memory import upload
from quire.sampling.logprobs import TopLogprobs
from quire.sampling.sampler import Sampler, SamplingBatch
from quire.worker.drafters.drafter import Drafter, NoDrafter
from quire.worker.drafters.step import SampledStep
from quire.worker.input_batch import FlatBatch
from quire.worker.runner import Runner, RunnerParts

SCORED_AT_ONCE = 256  # prompt tokens whose logits are in memory at the same time


@dataclass
class _Launched:
    """A step whose forward has been launched."""

    step: SchedulerOutput
    flat: FlatBatch
    logits: Tensor  # [places, vocab]
    sampling: SamplingBatch
    place_rows: Tensor  # [places], int64
    place_positions: Tensor  # [places], int64
    requests: dict[str, Tensor] | None = None  # if some have drafts, see Staging.sampled
    drafting: SampledStep | None = None  # input of the drafter, if there is one


@dataclass
class _Sampled:
    """A step whose sampling has been launched."""

    output: ModelRunnerOutput
    flat: FlatBatch
    # Waits. Returns the sampled tokens [places], or nothing if the step has no places. If some requests have drafts,
    # also returns how many tokens of each request are kept, [requests].
    read_tokens: Callable[[], list[Tensor]]
    # By request: its start in the logprobs of the step, and the requested width.
    logprobs: dict[int, tuple[int, int]] = field(default_factory=dict)
    read_logprobs: Callable[[], list[Tensor]] = list  # empty if no request wants logprobs
    read_prompts: dict[int, Callable[[], list[Tensor]]] = field(default_factory=dict)  # prompt logprobs by request
    read_drafts: Callable[[], list[Tensor]] = list  # empty if there are no drafts


class ModelRunner(Runner[_Launched]):
    """Executes the steps of generative models, see Runner. `sample` launches the sampling."""

    def __init__(
        self, parts: RunnerParts, sampler: Sampler, drafter: Drafter | None = None, drafts_stay: bool = False
    ) -> None:
        """drafter: None if there are no drafts or they are made on the host. drafts_stay: whether drafts stay on the
        device, see Speculation."""
        super().__init__(parts)
        self.sampler = sampler
        self.drafter = drafter or NoDrafter()
        self.drafts_stay = drafts_stay
        self.processors = sampler.processors
        self._unread: deque[_Sampled] = deque()  # in the order of the steps
        # By row: the prompt logprobs of the chunks so far, until they are reported.
        self._prompt_logprobs: dict[int, list[TopLogprobs]] = {}

    def install(self, new: NewRequest) -> None:
        self._prompt_logprobs.pop(new.row, None)
        self.check_kind(new)
        self.batch.install(new)
        self.adapters.install(new)
        self.processors.add(new.row, new)
        self.drafter.install(new)

    @torch.inference_mode()
    def sample(self, step_id: int, masks: TokenMasks | None = None) -> Callable[[], ModelRunnerOutput]:
        """See Runner. The next step can use the sampled tokens at once."""
        launched = self._launched.pop(step_id)
        if isinstance(launched, ModelRunnerOutput):
            return lambda: launched
        flat = launched.flat
        try:
            if masks is not None:
                self._apply_masks(launched.logits, masks)
            output = ModelRunnerOutput(step_id, [[]] * len(flat.rows), refusals=self._refused.pop(step_id, {}))
            sampled = self._sample(launched, output)
        except torch.OutOfMemoryError as error:
            skipped = self.out_of_memory(launched.step, error)
            return lambda: skipped
        if not self.device.is_async:
            self._read_until(sampled)
        if launched.drafting is not None:
            sampled.read_drafts = self._draft(launched.step, launched.drafting)
        return lambda: self._output(sampled, launched.step.num_next_drafts)

    def run(self, inputs: StepInputs, rows: int) -> None:
        hidden = self.forward(inputs)
        logits = self.model.logits(hidden[:rows])
        numbers = np.ones(rows, np.int64)
        arrays: dict[str, Array] = {
            "temperature": np.ones(rows, np.float32),
            "seeds": numbers,
            "output_positions": numbers,
        }
        arrays |= {"top_p": np.full(rows, 0.9, np.float32), "top_k": numbers * 50}
        tensors = self.device.upload(arrays)
        for omitted in ((), ("top_p",), ("top_k",), tuple(tensors)):
            self.sampler(logits, SamplingBatch.of({k: v for k, v in tensors.items() if k not in omitted}))
        self.drafter.draft(SampledStep.dummy(inputs, hidden, rows), 2)

    def launch(self, flat: FlatBatch, step: SchedulerOutput) -> _Launched:
        if step.known_tokens.rows:
            self.drafter.extend(step.known_tokens)
        sampling = self.batch.sampling(flat.place_rows, flat.place_positions + 1)
        extra = {"place_rows": flat.place_rows, "place_tokens": flat.place_tokens, **sampling}
        if flat.has_drafts:
            extra |= {"draft_rows": flat.rows, "num_places": flat.num_places, "place_start_loc": flat.place_start_loc}
        extra |= self.drafter.arrays(flat, step)
        inputs, on_device = self.staging.stage(flat, self.forward.fit(flat.size), step, extra)
        scored = bool((self.batch.num_prompt_logprobs[flat.rows] >= 0).any())
        num_places = len(flat.place_tokens)
        wanted = None if num_places == inputs.size.tokens else on_device["place_tokens"]
        reads_hidden = self.drafter.reads_hidden(max(step.num_next_drafts, default=0))
        needs_all = scored or reads_hidden
        hidden = self.forward(inputs, None if needs_all else wanted)
        drafting = self.drafter.note(flat, inputs, hidden if reads_hidden else None, on_device)
        if scored:
            self._score_prompts(flat, hidden, inputs)
        if needs_all:
            hidden = pick(hidden, wanted)
        # padded tokens may follow
        logits = self.forward.logits(hidden[:num_places], inputs, on_device["place_tokens"])
        batch = SamplingBatch.of({name: on_device[name] for name in sampling})
        positions = torch.from_numpy(flat.place_positions)
        if self.device.is_async:  # the host's positions are upper bounds there
            positions = inputs.positions[on_device["place_tokens"]]
            if batch.output_positions is not None and any(sampled.flat.has_drafts for sampled in self._unread):
                places = pick(torch.stack((positions, on_device["place_rows"]), 1), batch.random)
                batch.output_positions = places[:, 0] + 1 - self.staging.state.num_prompt[places[:, 1]]
        return _Launched(
            step,
            flat,
            logits,
            batch,
            on_device["place_rows"],
            positions,
            on_device if flat.has_drafts else None,
            drafting,
        )

    def results_of(self, launched: _Launched) -> Sequence[Tensor]:
        return torch.split(launched.logits, np.diff(launched.flat.place_start_loc).tolist())

    def _sample(self, launched: _Launched, output: ModelRunnerOutput) -> _Sampled:
        flat = launched.flat
        batch = self.batch
        rows = launched.flat.place_rows
        if not len(rows):
            self._unread.append(_Sampled(output, flat, self.device.download()))  # an empty download waits for the step
            return self._unread[-1]
        if self.processors.ask(rows):
            if self.processors.need_host_tokens(rows):
                self._read_all()  # while the device runs this step's forward
            launched.sampling.places = batch.sampling_places(flat, self.staging.state, launched.place_positions)
        if flat.has_drafts:
            columns = launched.place_rows, launched.place_positions
            launched.sampling.proposals = self.drafter.proposals(flat, *columns)
        num_logprobs = batch.num_logprobs[rows]
        asks = num_logprobs >= 0
        if asks.any():
            launched.sampling.num_logprobs = num_logprobs
            launched.sampling.named_tokens = batch.named_tokens(rows[asks])
        tokens, logprobs = self.sampler(launched.logits, launched.sampling)
        batch.expect(flat)
        kept = self.staging.sampled(launched.place_rows, launched.place_positions, tokens, launched.requests)
        if launched.drafting is not None:
            launched.drafting.kept = kept
        results = (tokens,) if kept is None else (tokens, kept)
        sampled = _Sampled(output, flat, self.device.download(*results))
        if logprobs is not None:
            bounds = np.concatenate(([0], asks.cumsum()))[flat.place_start_loc]  # [requests + 1]
            for request in np.diff(bounds).nonzero()[0].tolist():
                sampled.logprobs[request] = int(bounds[request]), 1 + int(batch.num_logprobs[flat.rows[request]])
            sampled.read_logprobs = self.device.download(*logprobs.columns)
        if self._prompt_logprobs:
            self._report_prompts(sampled)
        self._unread.append(sampled)
        return sampled

    def _draft(self, step: SchedulerOutput, sampled: SampledStep) -> Callable[[], list[Tensor]]:
        """Launch the drafter after a step. The returned function waits for the drafts sent to the host, if any."""
        try:
            drafts = self.drafter.draft(sampled, max(step.num_next_drafts, default=0))
        except torch.OutOfMemoryError as error:
            logger.warning("No drafts are made behind a step: %s", error_text(error))
            return list
        if drafts is None:
            return list
        if self.drafts_stay:
            self.staging.drafted(sampled.rows, drafts)
            return list
        return self.device.download(drafts)

    def _output(self, sampled: _Sampled, num_next_drafts: list[int]) -> ModelRunnerOutput:
        """Wait for the output of a step."""
        output = self._read_until(sampled)
        for made in sampled.read_drafts():
            columns = zip(made.tolist(), num_next_drafts, strict=True)
            output.draft_token_ids = [drafts[:count] for drafts, count in columns]
        return output

    def _apply_masks(self, logits: Tensor, masks: TokenMasks) -> None:
        bits = np.frombuffer(masks.bits, np.int32).reshape(len(masks.places), -1)
        if not bits.flags.writeable:  # it came in a message; torch requires writable memory
            bits = bits.copy()
        tensors = self.device.upload({"places": np.asarray(masks.places, np.int64), "bits": bits})
        self.staging.kernels.apply_token_masks(logits, tensors["places"], tensors["bits"])

    def _report_prompts(self, sampled: _Sampled) -> None:
        """Start to fetch the prompt logprobs of rows that sample for the first time."""
        for request in np.diff(sampled.flat.place_start_loc).nonzero()[0].tolist():
            row = int(sampled.flat.rows[request])
            if row in self._prompt_logprobs:
                scored = TopLogprobs.join(self._prompt_logprobs.pop(row))
                sampled.read_prompts[request] = self.device.download(*scored.columns)
                self.batch.num_prompt_logprobs[row] = -1

    def _read_until(self, last: _Sampled) -> ModelRunnerOutput:
        """Wait for the steps up to `last` and fill in their outputs. Returns the output of `last`."""
        while any(step is last for step in self._unread):
            self._read_first()
        return last.output

    def _read_all(self) -> None:
        """Wait for all steps and fill in their outputs."""
        while self._unread:
            self._read_first()

    def _read_first(self) -> None:
        """Wait for the first step that has not been read, and fill in its output."""
        sampled = self._unread[0]  # removed only when complete, since Ctrl-C may interrupt this at any time
        output = sampled.output
        if results := sampled.read_tokens():
            tokens, *kept = results
            self.batch.fill(sampled.flat, *(result.numpy() for result in results))
            drawn = tokens.tolist()
            bounds = sampled.flat.place_start_loc.tolist()
            ends = map(add, bounds, kept[0].tolist()) if kept else bounds[1:]
            output.sampled_token_ids = [drawn[start:end] for start, end in zip(bounds, ends, strict=False)]
        if columns := sampled.read_logprobs():
            logprobs = TopLogprobs(*columns)
            for request, (start, width) in sampled.logprobs.items():
                end = start + len(output.sampled_token_ids[request])
                output.logprobs[request] = logprobs.slice(start, end, width).pack()
        for request, read in sampled.read_prompts.items():
            output.prompt_logprobs[request] = TopLogprobs(*read()).pack()
        self._unread.popleft()

    def _score_prompts(self, flat: FlatBatch, hidden: Tensor, inputs: StepInputs) -> None:
        """For rows that request prompt logprobs, compute those of the prompt tokens that follow this step's tokens.
        They are stored until the row samples."""
        batch = self.batch
        asks = (batch.num_prompt_logprobs[flat.rows] >= 0).nonzero()[0]
        rows = flat.rows[asks]
        start = flat.query_start_loc[asks]
        first = flat.seq_lens[asks] - (flat.query_start_loc[asks + 1] - start)
        counts = np.maximum(np.minimum(flat.seq_lens[asks], batch.num_prompt[rows] - 1) - first, 0)
        ends = np.cumsum(counts)
        if not ends[-1]:
            return
        # [scored tokens]: the index of each within its row's tokens of this step
        offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        following = batch.token_ids[np.repeat(rows, counts), np.repeat(first, counts) + offsets + 1]
        device = hidden.device
        index = upload(np.repeat(start, counts) + offsets, device)
        tokens = upload(following.astype(np.int64), device)
        most = int(batch.num_prompt_logprobs[rows].max())
        parts = []
        for part, targets in zip(*(torch.split(t, SCORED_AT_ONCE) for t in (index, tokens)), strict=True):
            logits = self.forward.logits(hidden[part], inputs, part)
            parts.append(TopLogprobs.of(self.sampler.score(logits), targets, most))
        scored = TopLogprobs.join(parts)
        widths = 1 + batch.num_prompt_logprobs[rows]
        for row, count, end, width in zip(*(a.tolist() for a in (rows, counts, ends, widths)), strict=True):
            self._prompt_logprobs.setdefault(row, []).append(scored.slice(end - count, end, width))
