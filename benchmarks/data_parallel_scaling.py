"""Simulates how data parallelism scales: 1 to 64 replicas at 90 % load, with the real scheduler and router.

    python benchmarks/data_parallel_scaling.py [--plot FILE.png] [--routing load|prefix] [--ranks 1 2 4 8 16 32 64]

Requests of unequal lengths arrive at random times (Poisson), at 90 % of the rate that the replicas can sustain. Each
goes to one of the API processes. There are half as many of these as replicas, and each handles one thing at a time. It
tokenizes the request, asks its router for a replica, and later sends the tokens that the replica returns.

Only time is simulated: a step takes BASE + PER_TOKEN * its tokens. The time of an API process is measured beforehand
with `quire serve`, as processor time per request and per streamed token. Routing is timed within the simulation, for
each request. Scheduler, block pool and router are the real ones. A router has the same information about replicas as in
production: reports of steps with outputs for its process immediately, and reports of other steps ten times a second,
each after the delay of a message.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.scheduler_cost import BLOCK_SIZE, FULL, Sampler, make_request
from quire.engine.router import Router, token_pieces
from quire.messages.engine import EngineCoreOutput, EngineCoreRequest
from quire.messages.step import ModelRunnerOutput
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler

BASE, PER_TOKEN = 8e-3, 15e-6  # seconds of a step, and of each of its tokens: about those of an 8B model on an H100
MESSAGE = 100e-6  # seconds that a message between two processes takes
LOAD_SECONDS = 0.1  # as in quire/engine/core_process.py
LIMITS = SchedulerLimits(max_num_seqs=128, max_num_batched_tokens=2048, max_model_len=4096)
NUM_BLOCKS = 12_000
LOAD = 0.9
WARM_UP = 0.2  # share of the time, not counted
GOALS = 0.95, 1.2
TEXT = list(range(110_000))


class Arrival(NamedTuple):
    """A request that will arrive. first: the start of its prompt in TEXT."""

    number: int
    time: float
    first: int
    num_prompt_tokens: int
    num_output_tokens: int

    def request(self) -> EngineCoreRequest:
        prompt = TEXT[self.first : self.first + self.num_prompt_tokens]
        return make_request(self.number, prompt, self.num_output_tokens, self.time)


def make_trace(number: int, rate: float, seed: int) -> list[Arrival]:
    """Return requests in the order of their arrival. rate: requests per second; infinite if all arrive at once."""
    dice = random.Random(seed)
    trace = []
    now = 0.0
    for index in range(number):
        now += 0.0 if rate == float("inf") else dice.expovariate(rate)
        prompt = min(2000, max(16, int(dice.lognormvariate(5.7, 0.8))))
        output = min(800, max(4, int(dice.lognormvariate(4.8, 0.8))))
        trace.append(Arrival(index, now, dice.randrange(100_000), prompt, output))
    return trace


class Rank:
    """A replica: the real scheduler, with steps whose durations the time model gives."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(LIMITS, NUM_BLOCKS, FULL, BLOCK_SIZE, False)
        self.sampler = Sampler()
        self.is_busy = False
        self.reported_at = 0.0
        self.received: defaultdict[int, int] = defaultdict(int)  # by API process
        self.owners: dict[str, int] = {}

    def begin(self) -> tuple[float, ModelRunnerOutput] | None:
        step = self.scheduler.schedule()
        self.is_busy = bool(step.rows)
        return (BASE + PER_TOKEN * sum(step.num_tokens), self.sampler.run(step)) if step.rows else None


@dataclass
class Api:
    """An API process with its router. free_at: when it will have finished all its work."""

    router: Router
    free_at: float = 0.0
    busy: float = 0.0

    def work(self, now: float, seconds: float) -> float:
        """Return the time when the work is done."""
        self.free_at = max(now, self.free_at) + seconds
        self.busy += seconds
        return self.free_at


@dataclass
class Result:
    tokens_per_second: float
    offered_per_second: float
    ttft: list[float] = field(repr=False)
    routing_us: float
    api_load: float
    by_rank: list[int] = field(repr=False)

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.ttft, share))


class Simulation:
    def __init__(self, ranks: int, costs: tuple[float, float], by_prefix: bool) -> None:
        self.ranks = [Rank() for _ in range(ranks)]
        self.apis = [Api(Router(ranks, token_pieces if by_prefix else None)) for _ in range(max(1, ranks // 2))]
        self.per_request, self.per_token = costs
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = count()
        self.first_token: dict[int, float] = {}
        self.tokens: list[tuple[float, int]] = []  # when tokens reached a client, and how many
        self.num_sent = [0] * ranks
        self.routing = 0.0

    def at(self, time: float, event: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (time, next(self.order), event, arguments))

    def run(self, trace: list[Arrival]) -> Result:
        dice = random.Random(1)
        for arrival in trace:
            self.at(arrival.time, self.arrive, dice.randrange(len(self.apis)), arrival)
        while self.events:
            self.now, _, event, arguments = heapq.heappop(self.events)
            event(*arguments)
        assert len(self.first_token) == len(trace)
        end = trace[-1].time
        begin = WARM_UP * end
        counted = [arrival for arrival in trace if arrival.time >= begin]
        seconds = max(end - begin, 1e-9)
        return Result(
            sum(tokens for time, tokens in self.tokens if begin <= time < end) / seconds,
            sum(arrival.num_output_tokens for arrival in counted) / seconds,
            [self.first_token[arrival.number] - arrival.time for arrival in counted],
            1e6 * self.routing / len(trace),
            sum(api.busy for api in self.apis) / len(self.apis) / self.now,
            self.num_sent,
        )

    # ---- events

    def arrive(self, index: int, arrival: Arrival) -> None:
        self.at(self.apis[index].work(self.now, self.per_request), self.send, index, arrival.request())

    def send(self, index: int, request: EngineCoreRequest) -> None:
        start = perf_counter()
        rank = self.apis[index].router.route(request, range(len(self.ranks)))
        seconds = perf_counter() - start
        self.routing += seconds
        self.num_sent[rank] += 1
        self.at(self.apis[index].work(self.now, seconds) + MESSAGE, self.receive, rank, index, request)

    def receive(self, number: int, index: int, request: EngineCoreRequest) -> None:
        rank = self.ranks[number]
        rank.received[index] += 1
        rank.owners[request.request_id] = index
        rank.scheduler.add(request)
        if not rank.is_busy:
            self.step(number)

    def step(self, number: int) -> None:
        if begun := self.ranks[number].begin():
            self.at(self.now + begun[0], self.retire, number, begun[1])

    def retire(self, number: int, output: ModelRunnerOutput) -> None:
        rank = self.ranks[number]
        parts: dict[int, list[EngineCoreOutput]] = {}
        for said in rank.scheduler.update(output):
            parts.setdefault(rank.owners[said.request_id], []).append(said)
        self.step(number)
        if not rank.is_busy or self.now >= rank.reported_at + LOAD_SECONDS:
            rank.reported_at = self.now
            for index in range(len(self.apis)):
                parts.setdefault(index, [])
        running = len(rank.scheduler.running)
        waiting = len(rank.scheduler.requests) - running
        for index, part in parts.items():
            report = number, waiting, running, rank.received[index]
            self.at(self.now + MESSAGE, self.deliver, index, report, part)

    def deliver(self, index: int, report: tuple[int, int, int, int], outputs: list[EngineCoreOutput]) -> None:
        api = self.apis[index]
        api.router.report(*report)
        for output in outputs:
            done = api.work(self.now, self.per_token)
            self.first_token.setdefault(int(output.request_id[-8:]), done)
            self.tokens.append((done, len(output.new_token_ids)))


def capacity() -> float:
    """Requests per second that one replica completes while many wait."""
    simulation = Simulation(1, (0.0, 0.0), False)
    trace = make_trace(3000, float("inf"), 0)
    simulation.run(trace)
    times = sorted(simulation.first_token.values())
    low = len(times) // 4
    high = 3 * len(times) // 4
    return (high - low) / (times[high] - times[low])


async def _streams(url: str, number: int, tokens: int) -> None:
    gate, prompt = asyncio.Semaphore(32), "The old man and the sea. " * 55  # about 300 tokens, as in the trace

    async def one(session: aiohttp.ClientSession, index: int) -> None:
        body = {"prompt": f"{index} {prompt}", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        async with gate, session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            await response.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(session, index) for index in range(number)))


def measured_costs(rounds: int = 3) -> tuple[float, float]:
    """Processor time of the API process in seconds: for a request with one token, and for each additional token."""
    server = subprocess.Popen(
        [sys.executable, "-m", "quire", "serve", "--port", "0", "--max-num-seqs", "32", "--disable-uvicorn-access-log"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        url = next(found[1] for line in server.stderr if (found := re.search(r"Serving at (\S+): ", line)))
        process = psutil.Process(server.pid)

        def seconds(tokens: int, number: int = 200) -> float:
            before = process.cpu_times()
            asyncio.run(_streams(url, number, tokens))
            after = process.cpu_times()
            return (after.user + after.system - before.user - before.system) / number

        seconds(8)
        short = min(seconds(1) for _ in range(rounds))
        return short, (min(seconds(129) for _ in range(rounds)) - short) / 128
    finally:
        server.terminate()
        server.wait()


def plot(path: Path, results: dict[int, Result], one: Result) -> None:
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    ranks = list(results)
    left.plot(ranks, [one.tokens_per_second * n for n in ranks], "--", color="#7d8b99", label="linear")
    left.plot(ranks, [results[n].tokens_per_second for n in ranks], "o-", color="#2563a8", label="simulated")
    left.set(xscale="log", yscale="log", xlabel="replicas", ylabel="tokens a second")
    left.legend(frameon=False)
    for share, colour in ((50, "#7fb069"), (99, "#2563a8")):
        right.plot(ranks, [1e3 * results[n].percentile(share) for n in ranks], "o-", color=colour, label=f"p{share}")
    right.axhline(1e3 * GOALS[1] * one.percentile(99), ls="--", color="#7d8b99", label="goal of p99")
    right.set(xscale="log", ylim=(0, None), xlabel="replicas", ylabel="time to first token, ms")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.set_xticks(ranks, [str(n) for n in ranks])
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--routing", choices=("load", "prefix"), default="load")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--requests", type=int, default=30_000, help="at least; 2,500 a replica")
    parser.add_argument("--costs", type=float, nargs=2, help="µs of a request and of a token, instead of measuring")
    arguments = parser.parse_args()
    costs = tuple(c / 1e6 for c in arguments.costs) if arguments.costs else measured_costs()
    rate = LOAD * capacity()
    print(
        f"an API process needs {1e6 * costs[0]:.0f} µs for a request and {1e6 * costs[1]:.0f} µs for a token; "
        f"a replica gets {rate:.1f} requests/s, {LOAD:.0%} of what it can answer\n"
    )
    print(
        "| replicas | API processes | tokens/s | of linear | of offered | TTFT p50, ms | p99, ms | of one | "
        "routing, µs | API load | least and most requests of a replica |"
    )
    print("|---" * 11 + "|")
    results: dict[int, Result] = {}
    for ranks in arguments.ranks:
        simulation = Simulation(ranks, costs, arguments.routing == "prefix")
        result = results[ranks] = simulation.run(make_trace(max(arguments.requests, 2500 * ranks), rate * ranks, ranks))
        one = results[arguments.ranks[0]]
        print(
            f"| {ranks} | {len(simulation.apis)} | {result.tokens_per_second:,.0f} "
            f"| {result.tokens_per_second / one.tokens_per_second / ranks * arguments.ranks[0]:.3f} "
            f"| {result.tokens_per_second / result.offered_per_second:.3f} | {1e3 * result.percentile(50):.1f} "
            f"| {1e3 * result.percentile(99):.1f} | {result.percentile(99) / one.percentile(99):.2f} "
            f"| {result.routing_us:.1f} | {result.api_load:.2f} | {min(result.by_rank)}, {max(result.by_rank)} |",
            flush=True,
        )
    if arguments.plot:
        plot(arguments.plot, results, results[arguments.ranks[0]])


if __name__ == "__main__":
    main()
