"""The base of all runners: steps in two calls, and handling of requests that cannot be run."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from quire.config.engine import ConfigError
from quire.layers.step_inputs import StepInputs, StepSize
from quire.lora.store import adapter_store
from quire.messages.errors import error_text
from quire.messages.step import ModelRunnerOutput, NewRequest, SchedulerOutput, TokenMasks
from quire.models.model import Model
from quire.observability.logging import logger
from quire.worker.expert_balance import NoBalancer
from quire.worker.forward import Forward
from quire.worker.input_batch import FlatBatch, InputBatch
from quire.worker.media import NoMedia
from quire.worker.staging import Staging
from quire.worker.step_clock import NoClock

Launched = TypeVar("Launched")  # a step whose forward has been launched


@dataclass(frozen=True)
class RunnerParts:
    """The parts of a runner of any kind.

    media: for a model that accepts images or embeddings. balancer: of experts that may move. clock: tracks each step if
    other threads wait for its layers. is_only_rank: if False, running out of memory is an error, since the other ranks
    wait for this rank's part of the step. in_lockstep: whether other replicas wait for the forward of each step,
    including steps without rows.
    """

    model: Model
    batch: InputBatch
    staging: Staging
    forward: Forward
    media: NoMedia = field(default_factory=NoMedia)
    balancer: NoBalancer = field(default_factory=NoBalancer)
    clock: NoClock = field(default_factory=NoClock)
    is_only_rank: bool = True
    in_lockstep: bool = False


class Runner(ABC, Generic[Launched]):
    """Executes steps. Each step takes two calls: `submit` launches the forward, then `sample` returns its results.

    A step with a request that cannot be run is skipped. The later steps of its epoch are skipped too, since they were
    scheduled on the assumption that it had run. Requests of skipped steps are installed again before they continue.
    """

    pools: bool = False  # whether requests are pooled instead of generating tokens

    def __init__(self, parts: RunnerParts) -> None:
        self.model = parts.model
        self.batch = parts.batch
        self.staging = parts.staging
        self.forward = parts.forward
        self.media = parts.media
        self.balancer = parts.balancer
        self.clock = parts.clock
        self.is_only_rank = parts.is_only_rank
        self.in_lockstep = parts.in_lockstep
        self.was_finite = False  # whether a step has had finite results, see _check_numbers
        self.device = parts.staging.device
        experts = parts.model.experts
        self.adapters = adapter_store(parts.model.adapters, None if experts is None else experts.group)
        self._launched: dict[int, Launched | ModelRunnerOutput] = {}  # by step id; a skipped step has its output here
        self._skipped_epoch = -2  # steps of this epoch and of earlier ones are skipped
        self._refused: dict[int, dict[int, str]] = {}  # by step id: the refusals of a step that was launched

    def expect_new_weights(self) -> None:
        """Check the next results for numbers that are not finite, since the weights may have changed."""
        self.was_finite = False

    @torch.inference_mode()
    def submit(self, step: SchedulerOutput) -> None:
        """Launch the forward of a step, or skip the step. The output of `sample` shows which."""
        self.clock.begin(step.step_id)
        skipped = self._install(step)
        self.adapters.share()
        if skipped is not None:
            self._launched[step.step_id] = skipped
            if self.in_lockstep:
                self.forward(self.staging.stage_dummy(self.forward.fit(StepSize(1, 1, 1))))
        else:
            self.batch.add_known_tokens(step)
            self.batch.edit_block_tables(step)
            flat = self.batch.flatten(step)
            try:
                self.media.update(step)
                launched = self.launch(self.media.place(flat), step)
                self._launched[step.step_id] = launched
                if not self.was_finite and not self.device.is_async:
                    self._check_numbers(step, self.results_of(launched))
            except torch.OutOfMemoryError as error:
                self._launched[step.step_id] = self.out_of_memory(step, error)
        self.clock.end(not isinstance(self._launched[step.step_id], ModelRunnerOutput))
        self.balancer.count_step()

    def _install(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Install the new requests of a step. Returns the output of the step if it will not run."""
        if not step.rows or step.epoch <= self._skipped_epoch:
            return ModelRunnerOutput(step.step_id, was_skipped=bool(step.rows))
        refusals = {}
        for new in step.new_requests:
            try:
                self.install(new)
                self.media.install(new)
            except ValueError as error:
                refusals[step.rows.index(new.row)] = error_text(error)
        return self._skip(step, refusals) if refusals else None

    def check_kind(self, new: NewRequest) -> None:
        """Raises ValueError for a request of the wrong kind."""
        if self.pools and new.pooling_params is None:
            raise ValueError("this model does not generate; give the request pooling_params")
        if not self.pools and new.pooling_params is not None:
            raise ValueError("this model does not pool; give the request sampling_params instead of pooling_params")

    @abstractmethod
    def install(self, new: NewRequest) -> None:
        """Fill the row of a new request. Raises ValueError if the model cannot run it."""

    @abstractmethod
    def launch(self, flat: FlatBatch, step: SchedulerOutput) -> Launched: ...

    def results_of(self, launched: Launched) -> Sequence[Tensor]:
        """Return the results of a launched step for each request; empty if another rank has them."""
        return ()

    @abstractmethod
    def sample(self, step_id: int, masks: TokenMasks | None = None) -> Callable[[], ModelRunnerOutput]:
        """Launch the end of a submitted step. The returned function waits for the output. masks: which tokens may be
        sampled."""

    @abstractmethod
    def run(self, inputs: StepInputs, rows: int) -> None:
        """Run a whole dummy step of `rows` requests, to measure memory and compile kernels."""

    def _skip(self, step: SchedulerOutput, refusals: dict[int, str]) -> ModelRunnerOutput:
        self._skipped_epoch = step.epoch
        return ModelRunnerOutput(step.step_id, refusals=refusals, was_skipped=True)

    def check_start(self, step: SchedulerOutput) -> None:
        """Run a first step at start, since an asynchronous device must not be waited for in later steps. Raises
        ConfigError if its results are not finite."""
        self.submit(step)
        launched = self._launched[step.step_id]
        results = () if isinstance(launched, ModelRunnerOutput) else self.results_of(launched)
        is_wrong = not all(map(_is_finite, results))
        self.sample(step.step_id)()
        if is_wrong:
            raise ConfigError(self._not_finite())

    def _check_numbers(self, step: SchedulerOutput, results: Sequence[Tensor]) -> None:
        """Refuse requests whose first results are not finite, until all results of a step are finite.

        A type with too small a range gives NaN from the first step on, so later steps are not checked. The step is not
        skipped, because the ranks that do not have the results are already running it. results: by request, see
        results_of.
        """
        wrong = [index for index, result in enumerate(results) if not _is_finite(result)]
        if not wrong:
            self.was_finite = any(result.numel() for result in results)
            return
        logger.error("The first step failed: %s", message := self._not_finite())
        self._refused[step.step_id] = dict.fromkeys(wrong, message)
        for index in wrong:
            results[index].zero_()  # so that later reads find finite numbers

    def _not_finite(self) -> str:
        dtype = str(self.model.kernels.target.dtype).removeprefix("torch.")
        others = " or ".join(f"'{other}'" for other in ("bfloat16", "float32") if other != dtype)
        return (
            f"dtype: in {dtype}, the model computes NaN or infinity instead of logits. Its numbers exceed the range of "
            f"this type, or its weights or its inputs are damaged; try dtype={others}"
        )

    def out_of_memory(self, step: SchedulerOutput, error: torch.OutOfMemoryError) -> ModelRunnerOutput:
        """Refuse the newest request of the step, so that the other requests can continue with more memory."""
        if not self.is_only_rank:
            raise error
        if self.device.is_async:
            torch.cuda.empty_cache()
        reason = (
            f"the device ran out of memory in a step of {sum(step.num_tokens)} tokens; lower gpu_memory_utilization, "
            f"max_num_batched_tokens or max_num_seqs ({error_text(error)})"
        )
        return self._skip(step, {len(step.rows) - 1: reason})


def _is_finite(result: Tensor) -> bool:
    """Whether no value is NaN or positive infinity, and each row has a finite value: logits of -inf mark tokens that
    cannot be sampled. Waits for the device."""
    return not result.numel() or bool(torch.isfinite(result.amax(-1)).all())  # the largest of NaN and 1 is NaN
