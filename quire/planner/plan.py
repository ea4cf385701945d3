"""A plan: each layout's memory, latencies under a traffic, maximum load within the objectives, and cost."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread

import numpy as np

from quire.bench.slo import METRICS, Limit
from quire.planner.devices import Device
from quire.planner.layout import Layout, Stages
from quire.planner.memory import EngineOptions, Memory, kv_groups, memory_of
from quire.planner.roofline import RooflineTimes, StepTimes
from quire.planner.simulate import Replica, Run, simulate
from quire.planner.sizes import Footprint
from quire.planner.traffic import Traffic
from quire.scheduler.limits import SchedulerLimits

PERCENTILES = (50.0, 90.0, 99.0)
SEARCHED = 1000  # requests of the traffic in the search for the breaking load
FACTORS = 1 / 1024, 1024  # limits of the search, relative to the traffic's rate
_ROUNDS = 5  # bisection rounds; the load is found to within 2 %
_HOPELESS = 10.0  # a request that waits for this multiple of the TTFT limit ends a run of the search


@dataclass(frozen=True)
class Latencies:
    """Percentiles of each metric in seconds: metric -> percentile -> seconds. share: the share of good requests, whose
    own times exceed no limit. The ITL limit applies to the same percentile of a request's own gaps."""

    percentiles: dict[str, dict[float, float]]
    good_share: float
    met: bool


@dataclass(frozen=True)
class Load:
    """The result of serving requests at a rate. rate: requests per second, infinite if all arrive at once. Throughputs
    are per second of the run. busy: the share of time in which a stage computes. usage: peak usage of the KV cache."""

    rate: float
    seconds: float
    requests_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    goodput: float
    latencies: Latencies
    busy: float
    usage: float
    most_running: int
    preemptions: int
    cached_share: float

    @property
    def met(self) -> bool:
        return self.latencies.met


@dataclass(frozen=True)
class Cost:
    """Cost in the unit of the price. tokens: per million tokens, input and output together."""

    per_hour: float
    per_million_output_tokens: float
    per_million_tokens: float


@dataclass(frozen=True)
class Result:
    """The results of a layout. load, breaking: None if the model does not fit. breaking: the highest load found that
    meets the objectives; also None if there are no objectives or no load meets them. needed: replicas needed for the
    traffic, by proportion, if replicas are independent."""

    layout: Layout
    memory: Memory
    load: Load | None = None
    breaking: Load | None = None
    needed: int | None = None
    cost: Cost | None = None
    cost_at_breaking: Cost | None = None


@dataclass(frozen=True)
class Task:
    """The inputs of a layout's simulation. fitted: measured step times instead of counted ones, with the number of
    blocks of the measured engine."""

    footprint: Footprint
    device: Device
    options: EngineOptions
    quantization: str | None
    traffic: Traffic
    limits: Sequence[Limit] = ()
    price: float | None = None
    searches: bool = True
    fitted: tuple[StepTimes, int] | None = None

    def times(self, layout: Layout) -> StepTimes:
        if self.fitted is not None:
            return self.fitted[0]
        return RooflineTimes(self.footprint, layout, self.device, self.quantization, self.options.kv_element_bytes)

    def memory(self, layout: Layout) -> Memory:
        memory = memory_of(self.footprint, layout, self.device, self.options, self.quantization)
        return memory if self.fitted is None else memory.with_blocks(self.fitted[1])

    def replica(self, layout: Layout, memory: Memory) -> Replica:
        options = self.options
        gpu = self.device.kind.is_gpu
        depth = 1 + gpu if layout.pp == 1 else layout.pp + (not gpu)  # as in quire/engine/assemble.py
        limits = SchedulerLimits(
            options.max_num_seqs, options.max_num_batched_tokens, options.max_model_len, depth=depth, stages=layout.pp
        )
        groups = kv_groups(Stages(self.footprint, layout).parts[0], options.max_model_len)
        return Replica(limits, memory.blocks, groups, options.block_size)


def plan(task: Task, layouts: Sequence[Layout], processes: int = 1) -> Iterator[Result]:
    """Yield a result for each layout, in the given order, as they become available."""
    if processes == 1 or len(layouts) == 1:
        yield from (result_of(task, layout) for layout in layouts)
        return
    with ProcessPoolExecutor(min(processes, len(layouts)), get_context("spawn"), _end_with_parent) as pool:
        yield from pool.map(result_of, [task] * len(layouts), layouts)


def _end_with_parent() -> None:
    """End this process when its parent has ended. After a SIGKILL, there is no other notification."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def result_of(task: Task, layout: Layout) -> Result:
    memory = task.memory(layout)
    if not memory.fits:
        return Result(layout, memory)
    times = task.times(layout)
    replica = task.replica(layout, memory)

    def run(traffic: Traffic, latest: float = math.inf) -> Load:
        done = simulate(traffic, replica, times, layout.dp, layout.shares_experts, latest)
        return load_of(done, traffic, task.limits, layout)

    load = run(task.traffic)
    breaking = None
    if task.limits and task.searches and math.isfinite(task.traffic.rate):
        breaking = breaking_load(task.traffic.first(SEARCHED), task.limits, run)
    needed = None
    if breaking is not None and not layout.shares_experts:
        needed = max(1, math.ceil(layout.dp * load.rate / breaking.rate))
    return Result(
        layout, memory, load, breaking, needed, cost_of(task.price, layout, load), cost_of(task.price, layout, breaking)
    )


def breaking_load(traffic: Traffic, limits: Sequence[Limit], run: Callable[[Traffic, float], Load]) -> Load | None:
    """Return the highest load that meets the limits, by bisection of the rate. None if even a thousandth of the rate
    fails."""
    first = [limit.seconds for limit in limits if limit.metric == "ttft" and limit.percentile >= 90]
    latest = _HOPELESS * min(first, default=math.inf)

    def at(factor: float) -> Load:
        return run(traffic.faster(factor), latest)

    best: Load | None = None
    low = 0.0
    high = math.inf
    factor = 1.0
    while not (low and math.isfinite(high)) and FACTORS[0] <= factor <= FACTORS[1]:
        load = at(factor)
        if load.met:
            best = load
            low = factor
            factor = factor * 2
        else:
            high = factor
            factor = factor / 2
    if not low or not math.isfinite(high):
        return best
    for _ in range(_ROUNDS):
        factor = math.sqrt(low * high)
        load = at(factor)
        if load.met:
            best = load
            low = factor
        else:
            high = factor
    return best


def load_of(run: Run, traffic: Traffic, limits: Sequence[Limit], layout: Layout) -> Load:
    """Return the statistics of a run. A run that was given up misses the limits."""
    seconds = max(run.seconds, 1e-9)
    done = [request for request in run.requests if request.tokens]
    latencies = latencies_of(run, limits)
    output = sum(len(request.tokens) for request in done)
    given = sum(request.prompt for request in done)
    return Load(
        traffic.rate,
        seconds,
        len(done) / seconds,
        given / seconds,
        output / seconds,
        latencies.good_share * len(run.requests) / seconds,
        latencies,
        run.busy / seconds / layout.pp / (1 if layout.shares_experts else layout.dp),
        run.usage,
        run.most_running,
        sum(request.preemptions for request in done),
        sum(request.cached for request in done) / max(1, given),
    )


def latencies_of(run: Run, limits: Sequence[Limit]) -> Latencies:
    samples: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": []}
    gaps = []
    good = 0
    for request in run.requests:
        if not request.tokens:
            continue
        times = np.frombuffer(request.tokens)
        own = np.diff(times)
        of_request = {"ttft": times[0] - request.arrival, "e2e": times[-1] - request.arrival}
        if len(own):
            of_request["tpot"] = float(own.mean())
        for name, value in of_request.items():
            samples[name].append(value)
        gaps.append(own)
        good += all(
            (float(np.percentile(own, limit.percentile)) if len(own) else 0.0) <= limit.seconds
            if limit.metric == "itl"
            else of_request.get(limit.metric, 0.0) <= limit.seconds
            for limit in limits
        )
    values = {name: np.array(sample) for name, sample in samples.items()}
    values["itl"] = np.concatenate(gaps) if gaps else np.zeros(0)
    wanted = {name: {*PERCENTILES, *(limit.percentile for limit in limits if limit.metric == name)} for name in METRICS}
    percentiles = {
        name: {p: float(np.percentile(values[name], p)) if len(values[name]) else 0.0 for p in sorted(wanted[name])}
        for name in METRICS
    }
    complete = all(request.tokens for request in run.requests)
    met = complete and all(percentiles[limit.metric][limit.percentile] <= limit.seconds for limit in limits)
    return Latencies(percentiles, good / len(run.requests), met)


def cost_of(price: float | None, layout: Layout, load: Load | None) -> Cost | None:
    """price: per device and hour."""
    if price is None or load is None:
        return None
    hour = price * layout.ranks
    output = max(load.output_tokens_per_second, 1e-9) * 3600 / 1e6
    total = max(load.output_tokens_per_second + load.input_tokens_per_second, 1e-9) * 3600 / 1e6
    return Cost(hour, hour / output, hour / total)


def best_of(results: Sequence[Result], limits: Sequence[Limit]) -> Result | None:
    """Return the recommended layout: among those that meet the objectives, the one with the highest load and thus the
    lowest price per token. If none meets them, return the one with the most good requests. Without limits, return the
    one with the lowest median end-to-end latency."""
    fitting = [(result, result.load) for result in results if result.load is not None]
    if not fitting:
        return None

    def key(pair: tuple[Result, Load]) -> tuple[float, ...]:
        result, load = pair
        bears = result.breaking.rate if result.breaking is not None else 0.0
        good = load.goodput if limits else 0.0
        return load.met, bears if load.met else 0.0, good, -load.latencies.percentiles["e2e"][50.0]

    return max(fitting, key=key)[0]
