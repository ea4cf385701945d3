"""Measures the scheduler's cost: µs per request and step, and an hour of simulated traffic.

    python benchmarks/scheduler_cost.py

No model runs: sampled tokens come from a counter. The steady state is averaged over a multiple of 16 steps, so that
every request crosses a block boundary and hashes the full block as often as in production.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parent.parent))

from quire.kv.specs import KVCacheSpec, attention_spec
from quire.messages.engine import EngineCoreOutput, EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
EOS = 0
LIMIT_US = 6.0  # for schedule and update together, a request and step
FULL = [attention_spec([0])]
MIXED = [attention_spec([0]), attention_spec([1], window=512)]


class Sampler:
    """Returns outputs as a model runner would: a sampled token for each row whose tokens are all computed. stop_every:
    one in this many samples is end-of-sequence.
    """

    def __init__(self, stop_every: int | None = None) -> None:
        self.missing: dict[int, int] = {}  # row -> tokens that are not computed yet
        self.num_sampled = 0
        self.stop_every = stop_every

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        missing = self.missing
        for new in step.new_requests:
            missing[new.row] = len(new.token_ids) - new.num_computed_tokens
        sampled: list[list[int]] = []
        for row, count in zip(step.rows, step.num_tokens, strict=True):
            left = missing[row] - count
            if left:
                missing[row] = left
                sampled.append([])
            else:
                missing[row] = 1
                self.num_sampled += 1
                stops = self.stop_every is not None and self.num_sampled % self.stop_every == 0
                sampled.append([EOS if stops else 10 + self.num_sampled % 30_000])
        return ModelRunnerOutput(step.step_id, sampled)


def make_request(
    number: int, prompt: list[int], max_tokens: int, arrival: float = 0.0, priority: int = 0
) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineCoreRequest(f"cmpl-{number:08d}", prompt, params, number, max_tokens, EOS, [1], arrival, priority)


def make_prompt(dice: random.Random, length: int) -> list[int]:
    return [dice.randrange(10, 150_000) for _ in range(length)]


class Stopwatch:
    def __init__(self) -> None:
        self.schedule = self.update = 0.0
        self.num_rows = self.num_steps = 0

    def turn(
        self, scheduler: Scheduler, sampler: Sampler, in_flight: list[ModelRunnerOutput]
    ) -> list[EngineCoreOutput]:
        """Run one step of the engine loop, with len(in_flight) + 1 steps in flight."""
        start = perf_counter()
        step = scheduler.schedule()
        self.schedule += perf_counter() - start
        in_flight.append(sampler.run(step))
        self.num_rows += len(step.rows)
        self.num_steps += 1
        output = in_flight.pop(0)
        start = perf_counter()
        outputs = scheduler.update(output)
        self.update += perf_counter() - start
        return outputs

    def report(self, name: str) -> None:
        schedule, update = (1e6 * seconds / self.num_rows for seconds in (self.schedule, self.update))
        verdict = "ok" if schedule + update <= LIMIT_US else f"ABOVE the limit of {LIMIT_US} µs"
        step_ms = 1e3 * (self.schedule + self.update) / self.num_steps
        rows = self.num_rows / self.num_steps
        print(
            f"{name:<44} {schedule:5.2f} + {update:5.2f} = {schedule + update:5.2f} µs a request and step, "
            f"{step_ms:6.2f} ms a step of {rows:6.1f} rows  {verdict}"
        )


def steady_state(name: str, num_running: int, specs: list[KVCacheSpec], depth: int, num_steps: int) -> None:
    """Measure steps that only decode."""
    dice = random.Random(0)
    limits = SchedulerLimits(num_running, max(num_running, 8192), 4096, depth=depth)
    scheduler = Scheduler(limits, num_running * 56 * len(specs) + 2048, specs, BLOCK_SIZE)
    for number in range(num_running):
        scheduler.add(make_request(number, make_prompt(dice, dice.randint(33, 96)), 1024))
    sampler = Sampler()
    in_flight: list[ModelRunnerOutput] = []
    for _ in range(depth - 1):
        in_flight.append(sampler.run(scheduler.schedule()))
    warm_up = Stopwatch()
    while scheduler.waiting or warm_up.num_steps < 64:
        warm_up.turn(scheduler, sampler, in_flight)
    stopwatch = Stopwatch()
    for _ in range(num_steps):
        stopwatch.turn(scheduler, sampler, in_flight)
    assert stopwatch.num_rows == num_steps * num_running
    stopwatch.report(name)


def prefills_arriving(name: str, num_running: int, longest: int, depth: int, num_steps: int) -> None:
    """As many requests arrive as finish. A quarter of them share a document as their prefix. One token in 199 is a
    stop."""
    dice = random.Random(0)
    limits = SchedulerLimits(num_running, max(2 * num_running, 8192), 4096, depth=depth)
    scheduler = Scheduler(limits, num_running * 100, FULL, BLOCK_SIZE)
    document = make_prompt(dice, longest * 3 // 4)
    num_added = 0
    sampler = Sampler(stop_every=199)
    in_flight: list[ModelRunnerOutput] = []
    stopwatch = Stopwatch()
    for number in range(200 + num_steps):
        while len(scheduler.waiting) < num_running // 16:
            prompt = make_prompt(dice, dice.randint(longest // 16, longest))
            if dice.random() < 0.25:
                prompt = document + prompt[: longest // 16]
            scheduler.add(make_request(num_added, prompt, dice.randint(64, 640)))
            num_added += 1
        if number < depth - 1:
            in_flight.append(sampler.run(scheduler.schedule()))
            continue
        if number == 200:
            stopwatch = Stopwatch()
        stopwatch.turn(scheduler, sampler, in_flight)
    stopwatch.report(name)


def long_queue(name: str) -> None:
    """10,000 requests wait behind one that does not fit: a cached prompt of 100,000 tokens."""
    dice = random.Random(0)
    limits = SchedulerLimits(256, 8192, 120_000)
    scheduler = Scheduler(limits, 8192, FULL, BLOCK_SIZE)
    sampler = Sampler()
    prompt = make_prompt(dice, 100_000)
    scheduler.add(make_request(0, prompt, 1))
    warm_up = Stopwatch()
    while scheduler.requests:
        warm_up.turn(scheduler, sampler, [])
    for number in range(1, 129):
        scheduler.add(make_request(number, make_prompt(dice, 240), 2000))
    while scheduler.waiting:
        warm_up.turn(scheduler, sampler, [])
    scheduler.add(make_request(1000, prompt, 1))
    for number in range(10_000):
        scheduler.add(make_request(2000 + number, [7] * 32, 16))
    stopwatch = Stopwatch()
    for _ in range(160):
        stopwatch.turn(scheduler, sampler, [])
    assert len(scheduler.waiting) == 10_001
    print(f"{name:<44} {1e3 * stopwatch.schedule / stopwatch.num_steps:5.2f} ms to schedule a step of 128 rows")


def simulated_hour(depth: int) -> None:
    """Simulate an hour with one request per second. A step takes 20 ms plus 1 ms for every 16 tokens."""
    dice = random.Random(0)
    start = perf_counter()
    scheduler = Scheduler(SchedulerLimits(256, 512, 4096, depth=depth), 8192, FULL, BLOCK_SIZE)
    arrivals = [
        make_request(i, make_prompt(dice, dice.randint(32, 2048)), dice.randint(16, 512), arrival=float(i))
        for i in range(3600)
    ]
    arrivals.reverse()
    sampler = Sampler()
    in_flight: list[ModelRunnerOutput] = []
    clock = 0.0
    num_steps = 0
    num_finished = 0
    most_running = 0
    while arrivals or scheduler.has_unfinished:
        while arrivals and arrivals[-1].arrival_time <= clock:
            scheduler.add(arrivals.pop())
        if not scheduler.has_unfinished:
            clock = arrivals[-1].arrival_time
            continue
        step = scheduler.schedule()
        if step.rows:
            in_flight.append(sampler.run(step))
            clock += 0.020 + 0.001 * sum(step.num_tokens) / 16
            num_steps += 1
            most_running = max(most_running, len(step.rows))
        if len(in_flight) == depth or not step.rows:
            num_finished += sum(o.finish_reason is not None for o in scheduler.update(in_flight.pop(0)))
    seconds = perf_counter() - start
    assert num_finished == 3600
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    print(
        f"an hour of one request a second, depth {depth}: {seconds:.1f} s for {num_steps:,} steps and "
        f"{sampler.num_sampled:,} tokens; over at {clock:,.0f} s, at most {most_running} rows, "
        f"{scheduler.stats.preemptions} preemptions"
    )


def main() -> None:
    for depth in (1, 2):
        steady_state(f"decode, 256 running, depth {depth}", 256, FULL, depth, 640)
        steady_state(f"decode, 4,096 running, depth {depth}", 4096, FULL, depth, 64)
    steady_state("decode, 256 running, full + window, depth 2", 256, MIXED, 2, 640)
    for depth in (1, 2):
        prefills_arriving(f"prefills arriving, 256 rows, depth {depth}", 256, 1024, depth, 640)
        prefills_arriving(f"prefills arriving, 4,096 rows, depth {depth}", 4096, 256, depth, 96)
    long_queue("10,000 waiting behind 100k cached tokens")
    for depth in (1, 2):
        simulated_hour(depth)


if __name__ == "__main__":
    main()
