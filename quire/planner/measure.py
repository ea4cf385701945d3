"""Measures a model's steps on this machine, in a real engine, as samples for fitted step times."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.engine.llm import LLM
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import SchedulerOutput
from quire.planner.devices import DEVICES
from quire.planner.fitted import VERSION, Fit, Fitted, Sample, shape_of
from quire.planner.layout import Layout
from quire.planner.roofline import RooflineTimes
from quire.planner.sizes import Footprint
from quire.planner.work import StepWork, Window, step_work
from quire.platform.limits import processors
from quire.scheduler.request import Request

_GREEDY = SamplingParams(temperature=0.0)
_STEPS = 6  # decode steps before and after a prompt joins
_CONTEXTS = (24, 200, 800)  # prompt tokens of the decoding requests
_PROMPTS = (6, 16, 40, 96, 200, 400, 900)  # tokens of the joining prompt


@dataclass(frozen=True)
class Case:
    """`streams` requests with contexts of `context` tokens decode, then a prompt of `prompt` tokens joins them."""

    streams: int
    context: int
    prompt: int


class StepClock:
    """Runs steps of an engine, and records the work and the time of each. now: a clock, in seconds."""

    def __init__(self, llm: LLM, windows: tuple[Window, ...], now: Callable[[], float] = time.perf_counter) -> None:
        self.core = llm.core
        self._windows = windows
        self._now = now
        self._vocabulary = llm.processor.vocab_size
        self._rows: dict[int, Request] = {}
        self._works: list[StepWork] = []
        self._schedule = self.core.scheduler.schedule
        self._number = 0
        setattr(self.core.scheduler, "schedule", self._noted)  # noqa: B010  # mypy knows no methods that change

    def add(self, rng: random.Random, prompt: int, output: int) -> None:
        """Add a request with a random prompt."""
        self._number += 1
        tokens = [rng.randrange(3, min(10_000, self._vocabulary)) for _ in range(prompt)]
        self.core.add_request(EngineCoreRequest(f"measured {self._number}", tokens, _GREEDY, seed=0, max_tokens=output))

    def steps(self, most: int | None = None) -> Iterator[Sample]:
        """Run up to `most` steps, or until all requests have ended."""
        count = 0
        while self.core.has_unfinished and (most is None or count < most):
            self._works.clear()
            begin = self._now()
            self.core.step()
            seconds = self._now() - begin
            if len(self._works) == 1 and seconds > 0:
                yield Sample(self._works[0], seconds)
            count += 1

    def close(self) -> None:
        setattr(self.core.scheduler, "schedule", self._schedule)  # noqa: B010

    def _noted(self) -> SchedulerOutput:
        step = self._schedule()
        for new in step.new_requests:
            self._rows[new.row] = self.core.scheduler.requests[new.request_id]
        requests = [self._rows[row] for row in step.rows]
        if requests:
            places = sum(request.num_in_flight_samples > 0 for request in requests)
            ends = [request.num_computed_tokens for request in requests]
            self._works.append(step_work(ends, step.num_tokens, places, self._windows))
        return step


def cases(most_streams: int, longest: int, most_tokens: int) -> list[Case]:
    """Return cases that cover the steps of an engine. longest: tokens of a request. most_tokens: tokens of all requests
    together."""
    found = []
    streams = 1
    while streams <= most_streams:
        for context in _CONTEXTS:
            for prompt in _PROMPTS:
                needed = (context + 2 * _STEPS + 8) * streams + prompt + 2 * _STEPS
                if max(context, prompt) + 2 * _STEPS + 8 < longest and needed < most_tokens:
                    found.append(Case(streams, context, prompt))
        streams *= 2
    return found


def measure(
    llm: LLM, windows: tuple[Window, ...], seconds: float, now: Callable[[], float] = time.perf_counter, seed: int = 0
) -> list[Sample]:
    """Measure steps of an engine with one step in flight for about `seconds`, with at least one case for each number of
    streams. Its prefix cache must be off. Raises ValueError for an engine that is too small."""
    limits = llm.core.scheduler.limits
    kv = llm.core.scheduler.kv
    found = cases(limits.max_num_seqs - 1, limits.max_model_len, kv.pool.num_usable * kv.block_size)
    if not found:
        raise ValueError(f"max_model_len={limits.max_model_len} and the KV cache are too small to measure steps")
    rng = random.Random(seed)
    samples = list[Sample]()
    by_streams = {case.streams: [other for other in found if other.streams == case.streams] for case in found}
    clock = StepClock(llm, windows, now)
    began = time.perf_counter()
    is_first = True
    list(_run(clock, Case(1, _CONTEXTS[0], _PROMPTS[0]), rng))  # the first steps are traced, and take longer
    while is_first or time.perf_counter() - began < seconds:
        for of_streams in by_streams.values():
            samples += _run(clock, rng.choice(of_streams), rng)
            if not is_first and time.perf_counter() - began >= seconds:
                break
        is_first = False
    clock.close()
    return samples


def _run(clock: StepClock, case: Case, rng: random.Random) -> Iterator[Sample]:
    for _ in range(case.streams):
        clock.add(rng, rng.randint(case.context * 2 // 3, case.context), 2 * _STEPS + 8)
    yield from clock.steps(_STEPS + -(-case.streams * case.context // clock.core.scheduler.limits.longest_chunk))
    clock.add(rng, rng.randint(case.prompt * 2 // 3, case.prompt), _STEPS)
    yield from clock.steps()


def measured_fit(model: str | None, options: dict[str, Any], footprint: Footprint, seconds: float) -> Fit:
    """Start an engine with these options, and measure its steps. Raises the errors of LLM."""
    fixed = {"async_scheduling": False, "enable_prefix_caching": False, "wait_for_kernels": True}
    llm = LLM(model, **{**fixed, **options})
    try:
        times = RooflineTimes(
            footprint, Layout(), DEVICES["H100"]
        )  # counts for the fit, which do not depend on the device
        samples = measure(llm, times.windows, seconds)
        limits = llm.core.scheduler.limits
        kv = llm.core.scheduler.kv
        return Fit(
            VERSION,
            model or "the bundled model",
            machine_name(),
            shape_of(footprint),
            options.get("quantization"),
            times.windows,
            times.entries,
            times.score_operations,
            kv.pool.num_usable,
            kv.block_size,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            samples,
        )
    finally:
        llm.shutdown()


def machine_name() -> str:
    """Return the processor's name, and how many cores this process may use."""
    name = "a CPU"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {processors()} processors"


def table(fit: Fit, fitted: Fitted) -> str:
    """Return a table that compares fitted and measured times."""
    errors = np.array([abs(fitted.seconds(sample.work) / sample.seconds - 1) for sample in fit.samples])
    sizes = sorted({sample.work.tokens for sample in fit.samples})
    return (
        f"{len(fit.samples):,} steps of {sizes[0]} to {sizes[-1]} tokens on {fit.machine}; the fitted times are "
        f"within {np.median(errors):.1%} for half of them, and within {np.percentile(errors, 90):.1%} for nine of "
        "ten"
    )
