"""Breaks down the time of a decode step by engine stage, with many small requests running.

    python benchmarks/step_overhead.py [--requests 256] [--steps 200] [--sampled] [--json FILE]

It uses the bundled model. Each stage's time excludes that of the stages it calls. Results are medians over the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.engine.core import EngineCore
from quire.engine.output_processor import OutputProcessor
from quire.models.decoder import Decoder
from quire.ops.cpu.recording import Recording
from quire.sampling.sampler import Sampler
from quire.scheduler.scheduler import Scheduler
from quire.worker.graphs import RecordedForward
from quire.worker.input_batch import InputBatch
from quire.worker.model_runner import ModelRunner
from quire.worker.staging import Staging

STATIONS: list[tuple[str, type, str]] = [
    ("forward pass", Decoder, "forward"),
    ("forward pass", Decoder, "embed"),
    ("forward pass", Recording, "replay"),
    ("forward pass", Decoder, "logits"),
    ("sampling", Sampler, "__call__"),
    ("scheduler: schedule", Scheduler, "schedule"),
    ("scheduler: update", Scheduler, "update"),
    ("worker: flatten", InputBatch, "flatten"),
    ("worker: block tables, tokens", InputBatch, "edit_block_tables"),
    ("worker: block tables, tokens", InputBatch, "expect"),
    ("worker: block tables, tokens", InputBatch, "fill"),
    ("worker: staging", Staging, "stage"),
    ("worker: rotary, attention plan", RecordedForward, "__call__"),
    ("worker: the rest of submit", ModelRunner, "submit"),
    ("worker: the rest of sample", ModelRunner, "sample"),
    ("core: the loop", EngineCore, "step"),
    ("output: detokenize, gather", OutputProcessor, "process"),
    ("LLM: the loop", LLM, "_step"),
]
MODEL = {"forward pass", "sampling"}


class Clock:
    """Exclusive times of nested calls, a dictionary for each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._within: list[float] = []  # time of the nested calls in each open call

    def watch(self, station: str, owner: type, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if name == "_step":
                self.steps.append(defaultdict(float))
            self._within.append(0.0)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                total = time.perf_counter() - started
                if self.steps:
                    self.steps[-1][station] += total - self._within.pop()
                if self._within:
                    self._within[-1] += total

        setattr(owner, name, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sampled", action="store_true", help="at temperature 1 with top-p, not greedily")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    llm = LLM(max_num_seqs=arguments.requests, max_model_len=1024)
    params = SamplingParams(max_tokens=arguments.steps + 8, ignore_eos=True, temperature=0)
    if arguments.sampled:
        params = SamplingParams(max_tokens=arguments.steps + 8, ignore_eos=True, temperature=1, top_p=0.9)
    prompts = [f"Story {i}. Once upon a time there was" for i in range(arguments.requests)]
    llm.generate(prompts, params.clone(max_tokens=4), use_tqdm=False)
    clock = Clock()
    for station in STATIONS:
        clock.watch(*station)
    llm.generate(prompts, params, use_tqdm=False)
    steps = clock.steps[-arguments.steps :]  # these steps only decode
    names = list(dict.fromkeys(name for name, _, _ in STATIONS))
    medians = {name: statistics.median(step[name] for step in steps) * 1e3 for name in names}
    beside = statistics.median(sum(t for name, t in step.items() if name not in MODEL) for step in steps) * 1e3
    print(f"{arguments.requests} requests, {len(steps)} steps of decoding; milliseconds a step, median")
    for name, value in sorted(medians.items(), key=lambda item: -item[1]):
        print(f"  {name:34} {value:8.3f}")
    print(f"  {'all but forward pass and sampling':34} {beside:8.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"stations": medians, "beside": beside}))


if __name__ == "__main__":
    main()
