"""The choices of a core that follow from the profile of its machine, and the measurement for the next start."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from quire.config.engine import EngineConfig
from quire.executor.choice import uses_gpu
from quire.executor.threads import are_given
from quire.models.description import ModelDescription
from quire.observability.logging import logger
from quire.ops.cpu.build import SOURCES, find_compiler, find_library
from quire.ops.cpu.processor import cpu_features
from quire.platform.limits import free_on_host, processors
from quire.platform.machine_profile import (
    MachineProfile,
    age_text,
    can_keep_profile,
    is_better,
    machine_key,
    read_profile,
    write_profile,
)
from quire.worker.machine_defaults import Estimate, tokens_of_a_step, work_of
from quire.worker.machine_speed import NEEDED_BYTES, KernelProbe, Measurement

_QUIET_SECONDS = (5.0, 60.0, 600.0)  # of idleness before the first, second and last measurement


def current_key(cpu_isa: str) -> str:
    """Return the key under which the profile of the kernels with these instructions is stored."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.read_bytes())
    return machine_key([cpu_features(), cpu_isa, digest.hexdigest(), torch.__version__])


def most_threads() -> int:
    """Return how many threads this process may use. Call it before torch's thread count is reduced."""
    return min(torch.get_num_threads(), processors())


class IdleMeasurement:
    """Measures this machine while an engine is idle, and stores the profile for later starts.

    An idle engine calls `is_due` and `proceed` repeatedly, and `interrupt` when there is work. A busy machine is
    measured up to three times.
    """

    def __init__(
        self,
        key: str,
        threads: int,
        found: MachineProfile | None,
        waits: tuple[float, ...] = _QUIET_SECONDS,
        make_probe: Callable[[], KernelProbe] = KernelProbe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """key: under which the profile is stored. threads: the maximum number. found: the stored profile. waits:
        seconds of idleness before each attempt."""
        self.result = found
        self._key = key
        self._threads = threads
        self._make_probe = make_probe
        self._clock = clock
        self._waits = list(waits)
        self._idle_since = clock()
        self._measurement: Measurement | None = None

    def is_due(self) -> bool:
        return bool(self._waits) and self._clock() - self._idle_since >= self._waits[0]

    def interrupt(self) -> None:
        """Called when there is work: discard the samples so far, which may have been disturbed."""
        self._idle_since = self._clock()
        self._measurement = None

    def proceed(self) -> None:
        """Measure a sample, which takes some milliseconds."""
        if self._measurement is None:
            if not self._is_wanted():
                del self._waits[0]
                return
            probe = self._make_probe()
            self._measurement = Measurement(self._threads, probe.kinds, probe, compiled=probe.compiled)
        elif not self._measurement.proceed():
            profile = self._measurement.profile()
            self._measurement = None
            self._idle_since = self._clock()
            del self._waits[0]
            self._keep(profile)

    def _is_wanted(self) -> bool:
        if free_on_host() < NEEDED_BYTES or not can_keep_profile():
            return False
        if find_library() is not None:
            return True
        is_known = self.result is not None and not self.result.is_due(time.time())
        return find_compiler() is None and not is_known  # otherwise the kernels are being compiled or already measured

    def finish(self) -> None:
        """Measure at once, without waiting."""
        attempts = len(self._waits)
        while len(self._waits) == attempts and attempts:
            self.proceed()

    @property
    def is_needed(self) -> bool:
        """Whether this machine has never been measured while it was quiet."""
        return self.result is None or not self.result.is_quiet

    def _keep(self, profile: MachineProfile) -> None:
        if profile.is_quiet:
            self._waits.clear()
        else:
            logger.debug("The machine was too busy to be measured")
        if not is_better(profile, self.result):
            return
        self.result = profile
        if (reason := write_profile(self._key, profile)) is not None:
            logger.debug("The profile of this machine is not kept: %s", reason)
        elif profile.is_quiet:
            logger.info("This machine's speed was measured; the next start chooses threads and steps by it")


class Machine:
    """The profile of this machine, used if some options are left to choose and the model runs on CPUs.

    estimate: estimated times of the model's steps, None if unknown. threads: the fastest number, None for the default.
    measurement: for the next start, None if not needed. is_cpu: whether steps run on CPUs. reason: explains in the log
    how the numbers of threads and of tokens per step were chosen. is_measurable: whether these numbers may depend on a
    measurement.
    """

    estimate: Estimate | None = None
    threads: int | None = None
    measurement: IdleMeasurement | None = None

    def __init__(
        self, config: EngineConfig, description: ModelDescription, directory: Path, *, shares_experts: bool
    ) -> None:
        """shares_experts: whether other replicas share the experts; their steps must have the same size."""
        self._config = config
        self._description = description
        self._may_choose_tokens = not shares_experts
        self.reason = "as the options say"
        self.is_measurable = False
        # A profile is valid for the number of threads chosen from it. Other machines have their own profiles.
        is_alone = config.layout.machines == 1 and config.cluster.distributed_executor_backend != "ray"
        self.is_cpu = not uses_gpu(config)
        if not self.is_cpu or not is_alone or are_given(config.kernels.threads):
            return
        self.is_measurable = True
        key = current_key(config.kernels.cpu_isa)
        found = read_profile(key)
        if found is None or found.is_due(time.time()) or not found.compiled:
            self.measurement = IdleMeasurement(key, most_threads(), found)
        if found is None:
            self.reason = "the defaults, since this machine has not been measured"
        elif not found.is_quiet:
            self.reason = "the defaults, since this machine was busy when it was measured"
        else:
            self.reason = "the defaults, since this model's kernels have not been measured"
        if found is None or config.model.model_impl == "transformers":
            return
        work = work_of(description.spec, description.config, config.model.quantization, directory)
        estimate = Estimate(found, work)
        if config.model.dtype_name == "bfloat16" and estimate.is_usable:
            self.estimate, self.threads = estimate, estimate.threads()
            self.reason = f"as this machine was measured on {age_text(found)}"

    def with_tokens_of_a_step(self) -> EngineConfig:
        """Return the options, with the chosen number of tokens per step if one was chosen."""
        options = self._config.scheduler
        is_given = options.max_num_batched_tokens is not None or not options.enable_chunked_prefill
        if self.estimate is None or is_given or not self._may_choose_tokens or self._config.model.runner == "pooling":
            return self._config
        chosen = tokens_of_a_step(self.estimate.chunk(), options.max_num_seqs)
        needs_room = (  # for a whole image, a compression window, or drafts
            self._description.spec.media is not None
            or self._config.multimodal.enable_prompt_embeds
            or self._config.cache.compression is not None
            or options.speculation is not None
        )
        if needs_room:
            chosen = max(chosen, options.tokens_of_a_step(gpu=False))
        return replace(self._config, scheduler=replace(options, max_num_batched_tokens=chosen))
