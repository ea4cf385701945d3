"""Measures how long the stages of a pipeline are idle.

    python -m benchmarks.pipeline_idle [--model DIR]

With --model: two stages of that model serve the requests on this machine, each with one thread. A stage is idle while
its process uses no processor.

Without --model: simulated, with the real scheduler and a model of time.

A new request arrives whenever one finishes, so `--streams` requests run at all times. Prompts and outputs have
log-normal lengths like those of ShareGPT's conversations. A step takes each stage

    weights / stages + (per token * tokens + per key * keys that its tokens read) / stages

seconds, or the time of the arithmetic if it exceeds reading the weights. A stage starts when the previous one has
finished, and the link has transferred its hidden states. The defaults are those of an 8B model in bfloat16 on H100s.
"""

import argparse
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass
from itertools import product

from quire.kv.specs import attention_spec
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class Times:
    """Seconds that the whole model takes."""

    weights: float  # reading them
    token: float
    key: float  # per key that a query reads
    launch: float  # fixed time of a step on a stage
    host: float  # from a result to the next step
    link: float  # a token's hidden state from stage to stage

    def stage(self, tokens: int, keys: int, stages: int) -> float:
        return self.launch + max(self.weights, self.token * tokens) / stages + self.key * keys / stages


def on_h100(parameters: float, hidden: int, layers: int) -> Times:
    """In bfloat16, at 600 TFLOP/s for products, 400 for attention, 3.35 TB/s of memory bandwidth and 50 GB/s between
    cards.
    """
    return Times(
        weights=2 * parameters / 3.35e12,
        token=2 * parameters / 600e12,
        key=4 * hidden * layers / 400e12,
        launch=150e-6,
        host=300e-6,
        link=2 * hidden / 50e9,
    )


# A model of 1.1 B parameters on CPU cores with 150 GFLOP/s and 12 GB/s each, one core per stage
CPU = Times(weights=0.183, token=0.0147, key=4 * 2048 * 22 / 100e9, launch=1e-3, host=1e-3, link=4096 / 1e9)
MODELS = {"8B": on_h100(8e9, 4096, 32), "70B": on_h100(70e9, 8192, 80)}


def idle_shares(
    stages: int, times: Times, streams: int, requests: int, budget: int, depth: int | None = None, seed: int = 1
) -> tuple[list[float], float, float]:
    """Return the idle share of each stage, output tokens per second, and the mean time to first token."""
    limits = SchedulerLimits(streams, budget, 8192, depth=depth or stages, stages=stages)
    scheduler = Scheduler(limits, 200_000, [attention_spec([0])], 16, enable_prefix_caching=False)
    arriving = deque(
        EngineCoreRequest(str(i), [7] * prompt, SamplingParams(max_tokens=output), seed=0, max_tokens=output)
        for i, (prompt, output) in enumerate(lengths(requests, seed))
    )
    free = [0.0] * stages
    busy = [0.0] * stages
    flights: deque[tuple[SchedulerOutput, float]] = deque()
    computed: dict[int, int] = {}  # by row
    now = made = 0.0
    began: float | None = None
    warm = requests // 4
    ended = 0
    arrived: dict[str, float] = {}
    waited: list[float] = []

    def launch() -> bool:
        step = scheduler.schedule()
        if not step.rows:
            return False
        for new in step.new_requests:
            computed[new.row] = 0
        keys = 0
        for row, count in zip(step.rows, step.num_tokens, strict=True):
            keys += count * (computed[row] + (count + 1) // 2)
            computed[row] += count
        tokens = sum(step.num_tokens)
        ready = now
        for stage in range(stages):
            start = max(ready, free[stage])
            seconds = times.stage(tokens, keys, stages)
            free[stage] = start + seconds
            if began is not None:
                busy[stage] += seconds
            ready = free[stage] + times.link * tokens
        flights.append((step, ready))
        return True

    while True:
        while arriving and len(scheduler.requests) < streams:
            arrived[arriving[0].request_id] = now
            scheduler.add(arriving.popleft())
        if not arriving:
            break  # afterwards, too few requests remain
        while len(flights) < limits.depth and launch():
            pass
        step, done = flights.popleft()
        now = max(now, done) + times.host
        sampled = []
        for request, count in zip(scheduler._submitted[0][1], step.num_tokens, strict=True):
            sampled.append([9] if request.num_retired_tokens + count == len(request.token_ids) else [])
        made += sum(map(len, sampled)) * (began is not None)
        outputs = scheduler.update(ModelRunnerOutput(step.step_id, sampled))
        waited += [now - arrived.pop(o.request_id) for o in outputs if o.request_id in arrived]
        ended += sum(output.finish_reason is not None for output in outputs)
        if began is None and ended >= warm:
            began = now
            busy = [max(0.0, f - now) for f in free]
    assert began is not None
    # Work after `now` does not count.
    shares = [1 - (b - max(0.0, f - now)) / (now - began) for b, f in zip(busy, free, strict=True)]
    return shares, made / (now - began), statistics.mean(waited)


def lengths(requests: int, seed: int = 1) -> list[tuple[int, int]]:
    """Return the lengths of prompts and outputs, in tokens."""
    draw = random.Random(seed)
    return [
        (min(4000, 1 + int(draw.lognormvariate(5.2, 1.2))), min(2000, 1 + int(draw.lognormvariate(5.0, 0.9))))
        for _ in range(requests)
    ]


def measure(model: str, streams: int, requests: int, layers: list[int]) -> None:
    """Print the idle shares of two stages, while at least half of the streams are busy."""
    import psutil

    from quire import LLM, SamplingParams
    from quire.checkpoints.hub import bundled_model

    llm = LLM(
        model,
        load_format="dummy",
        tokenizer=str(bundled_model()),
        pipeline_parallel_size=2,
        pipeline_layers=layers,
        max_num_seqs=streams,
        max_model_len=6000,
        enable_prefix_caching=False,
    )
    ranks = [p for p in psutil.Process().children() if "quire.executor.rank" in p.cmdline()] + [psutil.Process()]
    arriving = deque(enumerate(lengths(requests)))
    ended = made = 0
    began: tuple[float, list[float]] | None = None
    while arriving:
        while arriving and len(llm.core.scheduler.requests) < streams:
            i, (prompt, output) = arriving.popleft()
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            request = llm.processor.process(str(i), [7 + i % 50] * prompt, params)
            for core_request in request.core_requests:
                llm.core.add_request(core_request)
        outputs = llm.core.step()
        ended += sum(output.finish_reason is not None for output in outputs)
        if began is None and ended >= requests // 8:
            began = time.perf_counter(), [sum(rank.cpu_times()[:2]) for rank in ranks]
        elif began is not None:
            made += sum(len(output.new_token_ids) for output in outputs)
    assert began is not None
    seconds = time.perf_counter() - began[0]
    used = [sum(rank.cpu_times()[:2]) - before for rank, before in zip(ranks, began[1], strict=True)]
    core = used.pop()
    idle = ", ".join(f"{100 * (1 - u / seconds):.1f} %" for u in used)
    print(
        f"{streams} streams, two stages: idle {idle} of {seconds:.0f} s, the core used {100 * core / seconds:.1f} %; "
        f"{made / seconds:.1f} tokens/s"
    )
    llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="*", default=[32, 128, 256])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--model")
    parser.add_argument("--layers", type=int, nargs="*", default=[], help="of the two stages of --model")
    options = parser.parse_args()
    if options.model:
        measure(options.model, options.streams[0], options.requests, options.layers)
        return
    cases = [(name, times, streams, 0) for (name, times), streams in product(MODELS.items(), options.streams)]
    cases += [("1B on processors", CPU, streams, 1) for streams in (16, 32, 64)]
    for name, times, streams, more in cases:
        alone = None
        for stages in (1, 2, 4, 8):
            depth = stages + more * (stages > 1)
            shares, rate, first = idle_shares(stages, times, streams, options.requests, options.budget, depth)
            alone = alone or rate
            print(
                f"{name}, {streams} streams, {stages} stages: idle {100 * statistics.mean(shares):.1f} %; "
                f"{rate:,.1f} tokens/s, {rate / alone:.2f} x one; first token after {1000 * first:,.0f} ms"
            )


if __name__ == "__main__":
    main()
