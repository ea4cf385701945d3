"""The loop: schedule, submit, sample, update, with a queue of submitted steps."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.kernel_switch import KernelSwitch
from quire.engine.lockstep_base import Lockstep, NoLockstep
from quire.engine.pause import PauseGate
from quire.engine.progress import Progress
from quire.engine.trials import TrialGate
from quire.engine.wake_up import WakeUp as WakeUpFlag
from quire.executor.base import Executor
from quire.kv.hashing import hash_root
from quire.messages.changes import (
    Command,
    Pause,
    PinPrefix,
    Profile,
    ReadWeights,
    Resume,
    Sleep,
    TakeWeights,
    TrainerOrder,
    UnpinPrefix,
    WakeUp,
)
from quire.messages.engine import CoreStats, EngineCoreOutput, EngineCoreRequest, FinishReason
from quire.messages.errors import EngineDeadError as EngineDeadError
from quire.messages.errors import error_text
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.observability.logging import logger
from quire.scheduler.pins import PinnedPrefixes
from quire.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from quire.engine.kv_events import KVEvents
    from quire.engine.machine import IdleMeasurement
    from quire.engine.observation.observer import Observer
    from quire.observability.profiling.core import CoreProfiler


SWITCH_SECONDS = 60.0  # how long a core may be silent while it reloads the model
COMPILE_SECONDS = 600.0  # how long it may wait for the kernels


@dataclass
class Flight:
    """A submitted step. result: None until sampling has been submitted. began: when the step was submitted."""

    step: SchedulerOutput
    result: Future[ModelRunnerOutput] | None = None
    began: float = 0.0


class NoKVEvents:
    """Replaces KVEvents in a core that does not publish prefix-cache events."""

    def publish(self) -> None: ...

    def close(self) -> None: ...


class EngineCore:
    """Drives a scheduler and an executor. At most `depth` steps are in flight: submitted, but with unread results.

    Depth 1 is the simple loop. With depth 2, the next step is scheduled while the device runs the current one. The
    sampled tokens then pass from one step to the next on the device. A pipeline has at least one step in flight per
    stage, and these steps sample for different requests.

    If its replica shares experts with others, a core with nothing to run runs a dummy step (one without rows) while
    another core has work.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        lockstep: Lockstep | None = None,
        kv_events: "KVEvents | None" = None,
        fingerprint: Callable[[Path], str] = str,
        pinned_share: float = 0.25,
        measurement: "IdleMeasurement | None" = None,
        journal: Path | None = None,
        report_silence: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """lockstep: synchronizes the cores whose replicas share experts with this one. kv_events: publishes cache
        events. fingerprint: returns that of the KV blocks after the weights have been replaced with those in a folder.
        pinned_share: the fraction of the KV cache that pinned prefixes may use. measurement: measures this machine for
        the next start. journal: see `TrialGate`. report_silence: called with the seconds of silence to expect."""
        self.scheduler = scheduler
        self.executor = executor
        self.measurement = measurement
        self._lockstep = lockstep or NoLockstep()
        self._flights: deque[Flight] = deque()
        self._kv_events = kv_events or NoKVEvents()
        if kv_events:
            scheduler.kv.pool.listeners.append(kv_events)
        self._pause = PauseGate()
        self._clears_cache = False
        self._is_draining = False
        self._asleep: set[str] = set()  # the sleeping parts: weights, kv_cache
        self._new_weights = Path()
        self._fingerprint = fingerprint
        self.progress = Progress()
        self.trials = TrialGate(scheduler.requests, self._wake, journal)
        # During a pause or a trial, ready requests must not begin to load blocks or compile a grammar.
        self._kernels = KernelSwitch(executor.deferred_kernels)
        scheduler.gates[:0] = [self._pause, self.trials, self._kernels]
        kv = scheduler.kv
        longest = scheduler.kv.max_blocks(scheduler.limits.max_model_len)
        most = min(int(pinned_share * kv.pool.num_usable), kv.pool.num_usable - longest)  # the longest request must fit
        self._pins = PinnedPrefixes(kv, most)
        self.wake_up = WakeUpFlag()
        for gate in scheduler.gates:
            gate.connect(self._wake)
        self._lockstep.connect(self._wake)
        self._report_silence = report_silence
        self._cause_of_death: BaseException | None = None
        self._retired_at = 0.0  # when the last step was retired; used only with a pace
        self._scheduled_at: dict[str, float] = {}  # by request id, for requests without an output so far

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises ValueError if it can never run."""
        self.trials.arrive(request)
        self.scheduler.add(request)
        if self.trials.is_active:
            self.trials.proceed()

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests. Ids of unknown and finished requests are ignored."""
        for request_id in request_ids:
            self.scheduler.abort(request_id)
            self._scheduled_at.pop(request_id, None)
        if self.trials.is_active:
            self.trials.proceed()

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._flights)

    @property
    def has_work(self) -> bool:
        """Whether a step can be run or retired. False if there are no requests, or all of them wait at gates."""
        return self.scheduler.has_work or bool(self._flights) or (self._lockstep.is_running and not self._asleep)

    @property
    def has_rest(self) -> bool:
        """Whether there are no requests and nothing sleeps."""
        return not (self.has_work or self.has_unfinished or self._pause.is_closed or self._asleep)

    def check(self) -> None:
        """Called periodically while the core is idle. Raises EngineDeadError if the executor has failed."""
        self._check_transfers()
        try:
            self.executor.check()
        except Exception as error:
            self._cause_of_death = error
            raise EngineDeadError(f"the engine failed: {error_text(error)}") from error

    def announce_silence(self, seconds: float) -> None:
        """Expect no progress and no heartbeat of this process for the given time."""
        self.progress.stop()
        self._report_silence(seconds)

    def _check_transfers(self) -> None:
        """Stop waiting for late transfers, so that their requests can run."""
        for connector in self.scheduler.connectors:
            connector.check_time()

    def _wake(self) -> None:
        self.scheduler.wake()
        self.wake_up.set()

    def step(self) -> list[EngineCoreOutput]:
        """Fill the queue of submitted steps, then retire the oldest. Blocks until the results of that step are known.

        If all unfinished requests wait at gates, it blocks until a gate may let one pass. Raises EngineDeadError.
        """
        if self._cause_of_death is not None:
            raise EngineDeadError(f"the engine failed: {error_text(self._cause_of_death)}") from self._cause_of_death
        try:
            self.progress.begin()
            failed = self._open_gates()
            if self._lockstep.has_others and self.scheduler.has_work:
                self._lockstep.begin()
            self._sample_oldest()  # the previous call may have been interrupted
            while not self._is_draining and len(self._flights) < self.scheduler.limits.depth and self._launch():
                pass
            outputs = failed + self._retire() if self._flights else failed
            self._sample_oldest()
            self._kv_events.publish()
        except Exception as error:
            self._cause_of_death = error
            raise EngineDeadError(f"the engine failed: {error_text(error)}") from error
        if self.trials.is_active:
            self.trials.proceed()
        if not self.has_work:
            self.progress.stop()
        if self._scheduled_at:
            for output in outputs:
                output.scheduled_at = self._scheduled_at.pop(output.request_id, 0.0)
        return outputs

    @property
    def stats(self) -> CoreStats:
        scheduler = self.scheduler
        pool = self.scheduler.kv.pool
        counts = scheduler.stats
        return CoreStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.requests) - len(scheduler.running),
            kv_cache_usage=(pool.num_usable - pool.num_free) / max(1, pool.num_usable),
            preemptions=counts.preemptions,
            prefix_queries=counts.prefix_queries,
            prefix_hits=counts.prefix_hits,
            computed_tokens=counts.computed_tokens,
            generated_tokens=counts.generated_tokens,
            is_paused=self._pause.is_closed,
            is_sleeping=bool(self._asleep),
            runs_reference=self.executor.runs_reference,
            external_queries=sum(connector.num_queries for connector in scheduler.connectors),
            external_hits=sum(connector.num_hits for connector in scheduler.connectors),
            speculation=scheduler.speculation.counts(),
        )

    def _launch(self) -> bool:
        """Submit the next step. It is sampled now if it needs no token masks, or if it is the oldest in flight.

        Returns False if nothing can be run, or if the previous step still waits for its masks: a step needs the sampled
        tokens of the previous step as inputs.
        """
        if self._flights and self._flights[-1].result is None:
            return False
        step = self.scheduler.schedule()
        if not step.rows:
            return self._launch_dummy(step)
        now = time.monotonic()
        for request in step.new_requests:
            scheduled = self.scheduler.requests[request.request_id]
            if not scheduled.num_preemptions and not scheduled.source.output_token_ids:
                self._scheduled_at.setdefault(request.request_id, now)
        self.progress.submit(step)
        try:
            needs_masks = self.scheduler.masks.are_needed()
            is_pipelined = self.scheduler.limits.stages > 1
            if needs_masks and (is_pipelined or not self._flights):
                self.scheduler.masks.begin()  # on a thread, since the forward may be done when `submit` returns
            self.executor.submit(step)
            masks = self.scheduler.masks.wait() if needs_masks and is_pipelined else None
            waits = needs_masks and not is_pipelined
            self._flights.append(Flight(step, None if waits else self.executor.sample(step.step_id, masks), now))
        except KeyboardInterrupt:  # the step is withdrawn; its requests can be aborted, or be scheduled again
            self.scheduler.withdraw(step)
            raise
        self._sample_oldest()
        self._lockstep.count_step(is_busy=True)
        return True

    def _launch_dummy(self, step: SchedulerOutput) -> bool:
        """Submit a step without rows, if other cores may wait for this one. Returns whether it did."""
        if not self._lockstep.is_running or self._asleep or self._flights:
            return False
        self.executor.submit(step)
        self._flights.append(Flight(step, self.executor.sample(step.step_id)))
        self._lockstep.count_step(self.scheduler.has_unfinished and self._pause.lets_pass(self.scheduler.requests))
        return True

    def _sample_oldest(self) -> None:
        """Sample the oldest step in flight if it waits for its token masks, which can be computed now."""
        if self._flights and self._flights[0].result is None:
            flight = self._flights[0]
            masks = self.scheduler.masks.wait() if flight.step.epoch == self.scheduler.epoch else None
            try:
                flight.result = self.executor.sample(flight.step.step_id, masks)
            except KeyboardInterrupt:  # the step is withdrawn, as in `_launch`
                self._flights.popleft()
                if flight.step.epoch == self.scheduler.epoch:
                    self.scheduler.withdraw(flight.step)
                raise

    def _retire(self) -> list[EngineCoreOutput]:
        """Wait for the results of the oldest step in flight, and pass them to the scheduler."""
        flight = self._flights[0]
        assert flight.result is not None
        result = flight.result.result()
        self._flights.popleft()
        self.progress.complete(flight.step, (later.step for later in self._flights))
        if (pace := self.scheduler.limits.pace) is not None:
            ended = time.monotonic()
            pace.observe(
                sum(flight.step.num_tokens), len(flight.step.rows), ended - max(flight.began, self._retired_at)
            )
            self._retired_at = ended
        if not flight.step.rows or flight.step.epoch < self.scheduler.epoch:
            return []  # a dummy step, or one skipped after a refusal, which the scheduler has withdrawn already
        outputs = self.scheduler.update(result)
        if result.refusals:
            _log_failures(outputs)
        return outputs

    def _open_gates(self) -> list[EngineCoreOutput]:
        """Admit requests that pass the gates. Waits for one if nothing else can be run.

        Returns the outputs of failed requests, and outputs of steps from before a kernel switch.
        """
        while self.has_unfinished and not self.has_work and not self.wake_up.wait(1.0):
            self._check_transfers()
        self.wake_up.clear()
        failed = self.scheduler.open_gates()
        _log_failures(failed)
        return failed + self._switch_kernels() if self._kernels.is_due else failed

    # ---- pauses, sleep and new weights

    def carry_out(self, command: Command) -> list[EngineCoreOutput]:
        """Carry out a command. Returns the outputs of steps that were in flight. Raises ValueError or OSError if it
        fails; then nothing has changed."""
        began = time.monotonic()
        self.progress.stop()
        try:
            return self._carry_out(command)
        finally:
            self.progress.stop()  # the steps drained by a pause may have restarted the clock
            if self._lockstep.has_others:
                self.progress.allow(time.monotonic() - began)

    def _carry_out(self, command: Command) -> list[EngineCoreOutput]:
        if isinstance(command, ReadWeights | TakeWeights | Profile) and self._kernels.are_compiling:
            return self._await_kernels() + self._carry_out(command)
        if isinstance(command, Pause):
            return self._begin_pause(command)
        if isinstance(command, TakeWeights):
            return self._take_weights(command)
        if isinstance(command, Resume):
            self._resume()
        elif isinstance(command, PinPrefix):
            self._pins.pin(command)
        elif isinstance(command, UnpinPrefix):
            self._pins.unpin(command.id)
        elif isinstance(command, Sleep):
            self._sleep(command)
        elif isinstance(command, Profile):
            self._profiler.obey(command)
        elif isinstance(command, WakeUp):
            self._end_sleep(command)
        else:
            self.executor.change(command)
            self._new_weights = Path(command.directory)
        return []

    def _end_sleep(self, command: WakeUp) -> None:
        if not self._asleep:
            return
        self.executor.change(command)
        self._asleep -= {name for name in ("weights", "kv_cache") if getattr(command, name)}
        if not self._asleep:
            self._resume()

    def exchange(self, order: TrainerOrder) -> Future[None]:
        """Exchange data between all ranks and a trainer while steps run."""
        if self._kernels.are_compiling:
            self._await_kernels()
        done = self.executor.exchange(order)
        done.add_done_callback(lambda _: self.wake_up.set())
        return done

    @property
    def has_paused(self) -> bool:
        """Whether the requested pause has been reached: no request runs."""
        return not self._flights and not self._pause.lets_pass(self.scheduler.requests)

    def finish_pause(self) -> None:
        """Called once when the pause has been reached."""
        if self._clears_cache:
            self.reset_prefix_cache()

    def _begin_pause(self, command: Pause) -> list[EngineCoreOutput]:
        self._clears_cache = command.clear_cache
        if command.mode == "wait":
            self._pause.close(self.scheduler.requests)
            return []
        self._pause.close()
        ids = list(self.scheduler.requests) if command.mode == "abort" else []
        self.abort_requests(ids)
        outputs = [EngineCoreOutput(request_id, [], FinishReason.ABORT) for request_id in ids]
        self._is_draining = True
        while self._flights:
            outputs += self.step()
        self._is_draining = False
        self.scheduler.hold()
        return outputs

    def _resume(self) -> None:
        if self._asleep:
            raise ValueError("the engine sleeps; wake it up")
        self._pause.open()

    def _sleep(self, command: Sleep) -> None:
        if not self._pause.lets_pass(self.scheduler.requests):
            while self._lockstep.is_running or self._flights:  # other cores need this one until all are idle
                self.step()
        if not self.has_paused:
            raise ValueError("the engine runs requests; pause it before it sleeps")
        self.reset_prefix_cache()
        for connector in self.scheduler.connectors:
            connector.finish_all(self.wake_up.wait)
        self.executor.change(command)
        self._asleep = {"weights", "kv_cache"}

    def _take_weights(self, command: TakeWeights) -> list[EngineCoreOutput]:
        """Replace the weights. Running requests are held, and then recomputed from their tokens so far with the new
        weights."""
        outputs = []
        ran = not self._pause.is_closed
        if command.use and not self.has_paused:
            outputs = self._begin_pause(Pause("keep"))
        self.progress.stop()
        self.executor.change(command)
        if command.use:
            self.reset_prefix_cache()
            self.scheduler.encoders.clear()
            root = hash_root(self._fingerprint(self._new_weights))
            self.scheduler.kv.change_root(root, self.scheduler.requests.values())
            self._asleep.discard("weights")
        if ran:
            self._pause.open()
        return outputs

    def _switch_kernels(self) -> list[EngineCoreOutput]:
        """Use the compiled kernels, unless the engine is paused. Running requests are recomputed from their tokens so
        far, since the KV cache is a new one."""
        if self._pause.is_closed:
            return []
        outputs = self._begin_pause(Pause("keep"))
        self._use_compiled()
        self._pause.open()
        return outputs

    def _use_compiled(self) -> None:
        self.announce_silence(SWITCH_SECONDS)
        self._kernels.switch()
        self.reset_prefix_cache()
        self.scheduler.encoders.clear()

    def _await_kernels(self) -> list[EngineCoreOutput]:
        """Wait for the compiled kernels, since a command must apply to their model. Raises ValueError during a pause
        that has not been reached yet."""
        self.announce_silence(COMPILE_SECONDS)
        self._kernels.wait()
        if not self._pause.is_closed:
            return self._switch_kernels()
        if not self.has_paused:
            raise ValueError("the engine is about to change to compiled kernels; try again when it has paused")
        self._use_compiled()
        return []

    def look(self, viewer: str) -> bytes:
        """See Look. Nothing is recorded before the first look."""
        return self._observer.look(viewer)

    @cached_property
    def _observer(self) -> "Observer":
        from quire.engine.observation.observer import Observer

        return Observer(self)

    @cached_property
    def _profiler(self) -> "CoreProfiler":
        from quire.observability.profiling.core import CoreProfiler

        return CoreProfiler(self)

    def reset_prefix_cache(self, external: bool = False) -> None:
        """Forget all cached prefixes. Pinned ones are unpinned until they are computed and pinned again. external: also
        forget the blocks in tiers."""
        self._pins.clear()
        self.scheduler.kv.reset_prefix_cache(external)
        self._kv_events.publish()

    def shutdown(self) -> None:
        self.executor.shutdown()
        for connector in self.scheduler.connectors:
            connector.close()
        self._kv_events.close()
        self._lockstep.close()
        self.wake_up.close()


def _log_failures(outputs: list[EngineCoreOutput]) -> None:
    """Log failed requests, but not bad requests: these are the clients' errors, and the reasons may quote their
    content."""
    for output in outputs:
        if output.finish_reason is FinishReason.ERROR:
            logger.error("Request %s failed: %s", output.request_id, output.stop_reason)
