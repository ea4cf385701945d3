"""Measures the gap between two steps in a core's process, by the number of streams. The rest of a step is the model.

    python benchmarks/step_gap.py [--streams 1,64,512] [--tokens 200] [--rounds 3] [--json FILE]

A client in this process streams texts of the bundled model from a core in a separate process, as in a server. Each
round restarts the core. Results are medians over the steps with all streams.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quire.engine import cores
from quire.engine.async_llm import AsyncLLM
from quire.engine.core_process import run_core
from quire.messages.sampling_params import SamplingParams

TIMES_FILE = "QUIRE_STEP_GAP_FILE"  # the environment variable with the path that the core's process writes to


def run_timed_core(*arguments: Any, **named: Any) -> None:
    """Run `run_core`, and record its steps: (rows, start of the forward pass, end of sampling)."""
    from quire.worker.model_runner import ModelRunner

    steps: list[tuple[int, float, float]] = []
    submit = ModelRunner.submit
    sample = ModelRunner.sample
    begun: list[tuple[int, float]] = []

    def timed_submit(self: Any, step: Any) -> None:
        begun.append((len(step.rows), time.perf_counter()))
        submit(self, step)

    def timed_sample(self: Any, *given: Any) -> Any:
        result = sample(self, *given)
        steps.append((*begun.pop(0), time.perf_counter()))
        return result

    ModelRunner.submit = timed_submit  # type: ignore[method-assign]
    ModelRunner.sample = timed_sample  # type: ignore[assignment, method-assign]
    atexit.register(lambda: Path(os.environ[TIMES_FILE]).write_text(json.dumps(steps)))
    try:
        run_core(*arguments, **named)
    finally:
        Path(os.environ[TIMES_FILE]).write_text(json.dumps(steps))


async def stream(llm: AsyncLLM, number: int, tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    async for _ in llm.generate({"prompt_token_ids": [10 + number % 100, 20, 30]}, params, f"request-{number}"):
        pass


async def serve(streams: int, tokens: int) -> float:
    """Return the seconds from the first request to the last output."""
    llm = AsyncLLM(max_num_seqs=streams, max_model_len=512, max_num_batched_tokens=4096)
    await llm.start()
    try:
        await stream(llm, 10**6, 20)
        began = time.perf_counter()
        await asyncio.gather(*(stream(llm, number, tokens) for number in range(streams)))
        return time.perf_counter() - began
    finally:
        await llm.shutdown()


def gaps(steps: list[tuple[int, float, float]], streams: int) -> tuple[float, float]:
    """Return the median gap before a step and the median step time, in seconds, over steps with all streams."""
    full = [(a, b) for a, b in pairwise(steps) if a[0] == b[0] == streams]
    return statistics.median(b[1] - a[2] for a, b in full), statistics.median(b[2] - b[1] for _, b in full)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,64,512")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cores.run_core = run_timed_core  # type: ignore[attr-defined]
    rows = []
    with TemporaryDirectory() as folder:
        os.environ[TIMES_FILE] = f"{folder}/times.json"
        for number in range(options.rounds):
            for streams in map(int, options.streams.split(",")):
                seconds = asyncio.run(serve(streams, options.tokens))
                gap, step = gaps(json.loads(Path(os.environ[TIMES_FILE]).read_text()), streams)
                row = {
                    "round": number,
                    "streams": streams,
                    "gap_us": gap * 1e6,
                    "step_us": step * 1e6,
                    "seconds": seconds,
                }
                rows.append(row)
                print("{streams:4} streams: gap {gap_us:7.0f} µs, step {step_us:8.0f} µs".format(**row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
