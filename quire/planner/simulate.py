"""Runs the real scheduler on a traffic, with a clock driven by a model of step times."""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.router import Router
from quire.kv.specs import ModelKVSpec
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import ModelRunnerOutput
from quire.planner.roofline import StepTimes
from quire.planner.traffic import Traffic
from quire.planner.work import StepWork, step_work
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler

_SAMPLED: list[int] = [0]  # the sampled tokens of a row, which are never read
_NOTHING: list[int] = []
_PARAMETERS = SamplingParams()


@dataclass(frozen=True)
class Replica:
    """The components that all replicas have in common."""

    limits: SchedulerLimits
    num_blocks: int
    groups: Sequence[ModelKVSpec]
    block_size: int

    def simulated_blocks(self, traffic: Traffic) -> int:
        """Return the number of blocks that this traffic can use at most. The cache of a small model has millions more,
        and creating them would take most of the time."""
        # A request of max_model_len tokens must fit, whatever the traffic.
        lengths = [self.limits.max_model_len, *(arrival.prompt + arrival.output for arrival in traffic.arrivals)]
        most = len(self.groups) * sum(length // self.block_size + 2 for length in lengths)
        return min(self.num_blocks, most)


@dataclass
class Served:
    """A request's times, in seconds since the start. tokens: the time of each token. cached: prompt tokens that were
    found in the prefix cache."""

    arrival: float
    prompt: int
    tokens: array[float] = field(default_factory=lambda: array("d"))
    cached: int = 0
    preemptions: int = 0


@dataclass
class Run:
    """A simulated run. seconds: until the last token. busy: total seconds of steps, over all stages of all replicas.
    usage: the peak share of the KV cache in use."""

    requests: list[Served]
    seconds: float = 0.0
    steps: int = 0
    busy: float = 0.0
    usage: float = 0.0
    most_running: int = 0


class _Flight(NamedTuple):
    """A step of a group of replicas. results: the results of the replicas with requests in it, with their schedulers.
    done: when the results are available."""

    results: list[tuple[Scheduler, ModelRunnerOutput]]
    done: float


class _Group:
    """Replicas that run their steps together: replicas that share experts, or a single replica."""

    def __init__(self, replica: Replica, count: int, times: StepTimes, run: Run, traffic: Traffic) -> None:
        self.times = times
        self.run = run
        self.depth = replica.limits.depth
        self.num_blocks = replica.num_blocks
        blocks = 1 + replica.simulated_blocks(traffic)
        prefixes = traffic.has_prefixes
        self.schedulers = [
            Scheduler(replica.limits, blocks, list(replica.groups), replica.block_size, prefixes) for _ in range(count)
        ]
        self._rows: list[dict[int, Request]] = [{} for _ in range(count)]
        self._flights: deque[_Flight] = deque()
        self._stage_free: list[float] = []  # when each stage has finished its work
        self._host_free = 0.0
        self.received = [0] * count
        self.is_idle = True

    def turn(self, now: float) -> float | None:
        """Run one iteration of the core's loop (quire/engine/core.py): retire the step whose results are available now,
        and fill the queue of submitted steps. Returns when the next results are available, None if nothing is left."""
        if self._flights and self._flights[0].done <= now:
            self._retire(self._flights.popleft(), now)
        while len(self._flights) < self.depth and self._launch(now):
            pass
        self.is_idle = not self._flights
        return None if self.is_idle else max(now, self._flights[0].done)

    def _launch(self, now: float) -> bool:
        results: list[tuple[Scheduler, ModelRunnerOutput]] = []
        works: list[StepWork] = []
        for scheduler, by_row in zip(self.schedulers, self._rows, strict=True):
            step = scheduler.schedule()
            for new in step.new_requests:
                by_row[new.row] = scheduler.requests[new.request_id]
            requests = [by_row[row] for row in step.rows]
            if not requests:
                works.append(step_work([1], [1], 0, self.times.windows))  # a dummy step while other replicas work
                continue
            # A request with a token in flight also samples in this step, and gets the token when the results arrive.
            sampled = [_SAMPLED if request.num_in_flight_samples else _NOTHING for request in requests]
            ends = [request.num_computed_tokens for request in requests]
            works.append(step_work(ends, step.num_tokens, len(requests) - sampled.count(_NOTHING), self.times.windows))
            results.append((scheduler, ModelRunnerOutput(step.step_id, sampled)))
            pool = scheduler.kv.pool
            self.run.usage = max(self.run.usage, (pool.num_usable - pool.num_free) / self.num_blocks)
            self.run.most_running = max(self.run.most_running, len(scheduler.running))
        if not results:
            return False
        self._host_free = done = max(now, self._host_free) + self.times.host(works)
        stages = self.times.stages(works)
        self._stage_free = self._stage_free or [0.0] * len(stages)
        for stage, seconds in enumerate(stages):
            done = self._stage_free[stage] = max(done, self._stage_free[stage]) + seconds
        self._flights.append(_Flight(results, done))
        self.run.steps += 1
        self.run.busy += sum(stages)
        return True

    def _retire(self, flight: _Flight, now: float) -> None:
        for scheduler, result in flight.results:
            for output in scheduler.update(result):
                served = self.run.requests[int(output.request_id)]
                served.tokens.append(now)
                if output.finish_reason is not None:
                    served.cached = output.num_cached_tokens
                    served.preemptions = output.num_preemptions
        self.run.seconds = max(self.run.seconds, now)


def simulate(
    traffic: Traffic,
    replica: Replica,
    times: StepTimes,
    replicas: int = 1,
    together: bool = False,
    latest: float = float("inf"),
) -> Run:
    """Simulate all requests. together: replicas run their steps together.

    latest: give up when a request has waited longer than this many seconds for its first token; later requests then
    have no tokens.
    """
    run = Run([Served(arrival.time, arrival.prompt) for arrival in traffic.arrivals])
    num_groups, size = (1, replicas) if together else (replicas, 1)
    groups = [_Group(replica, size, times, run, traffic) for _ in range(num_groups)]
    router: Router[None] = Router(replicas)
    ready = range(replicas)
    events: list[tuple[float, int]] = []  # (time of a group's next turn, the group's number)
    arrivals = iter(enumerate(traffic.arrivals))
    upcoming = next(arrivals, None)
    while upcoming is not None or events:
        if upcoming is not None and (not events or upcoming[1].time <= events[0][0]):
            number, arrival = upcoming
            upcoming = next(arrivals, None)
            which, index = divmod(router.route(None, ready), size)
            group = groups[which]
            group.schedulers[index].add(
                EngineCoreRequest(
                    str(number),
                    arrival.tokens(number),
                    _PARAMETERS,
                    seed=0,
                    max_tokens=arrival.output,
                    arrival_time=arrival.time,
                )
            )
            group.received[index] += 1
            if group.is_idle:
                group.is_idle = False
                heapq.heappush(events, (arrival.time, which))
            continue
        now, which = heapq.heappop(events)
        group = groups[which]
        then = group.turn(now)
        for index, scheduler in enumerate(group.schedulers):
            running = len(scheduler.running)
            waiting = len(scheduler.requests) - running
            router.report(which * size + index, waiting, running, group.received[index])
            first = scheduler.waiting.peek()
            if first is not None and now - first.source.arrival_time > latest:
                return run
        if then is not None:
            heapq.heappush(events, (then, which))
    return run
