"""Breaks down the time of a step by CPU kernel: milliseconds, share, and the rate at which products read and multiply.

    python benchmarks/kernel_times.py MODEL [--case one 16 prompt] [--cpu-isa avx2] [--cpu-time] [--json FILE]

Cases are decode steps of one or more streams after 128 tokens (`one`, or a number), and `prompt`, a prompt of 512
tokens. Steps run without recording, so that each kernel is a separate call. Figures are medians over steps; "the rest"
is the time in these steps outside kernels. --cpu-time: measure the processor time of one thread, for busy machines.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.ops.cpu import build

PROMPT = 128
LONG_PROMPT = 512


class Times:
    """Seconds and calls of each kernel in a step, by name and sizes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.step: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        self._function = build._kernel
        build._kernel = self.timed  # type: ignore[assignment]

    def timed(self, name: str, arguments: str) -> Callable[..., None]:
        function = self._function(name, arguments)

        def call(*values: Any) -> None:
            started = self.clock()
            function(*values)
            entry = self.step[label(name, values)]
            entry[0] += self.clock() - started
            entry[1] += 1

        return call

    def take(self) -> dict[str, list[float]]:
        taken = self.step
        self.step = defaultdict(lambda: [0.0, 0])
        return taken


def label(name: str, values: tuple[Any, ...]) -> str:
    name = name.removeprefix("quire_")
    if name == "linear":
        rows = values[3]
        out = values[5]
        words = values[6]
        return f"{name} {rows} x {out} x {words * (1 if values[0] == 0 else 2)}"
    if name == "quantized_linear":
        return f"{name} {values[1]} bits {values[4]} x {values[15]} x {values[16]}"
    return name


def products(name: str) -> int:
    """Return the number of multiplications and additions of one call."""
    if "linear" not in name:
        return 0
    rows, out, inputs = (int(part) for part in name.replace("x", " ").split()[-3:])
    return 2 * rows * out * inputs


def prompts_of(count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randint(3, 10_000) for _ in range(length)]} for _ in range(count)]


def measure(llm: LLM, case: str, times: Times, wanted: int) -> list[tuple[float, dict[str, list[float]]]]:
    """Return the seconds and kernels of each step of the case."""
    steps: list[tuple[float, dict[str, list[float]]]] = []
    step = llm._step

    def timed(*arguments: Any) -> Any:
        times.take()
        started = times.clock()
        result = step(*arguments)
        steps.append((times.clock() - started, times.take()))
        return result

    llm._step = timed  # type: ignore[method-assign]
    try:
        if case == "prompt":
            for seed in range(max(1, wanted // 4)):
                params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0)
                llm.generate(prompts_of(1, LONG_PROMPT, seed), params, use_tqdm=False)  # type: ignore[arg-type]
            return sorted(steps, key=lambda s: -s[0])[: max(1, wanted // 4)]
        count = 1 if case == "one" else int(case)
        params = SamplingParams(max_tokens=wanted + 3, ignore_eos=True, temperature=0)
        llm.generate(prompts_of(count, PROMPT, 1), params, use_tqdm=False)  # type: ignore[arg-type]
        return steps[-wanted - 1 : -1]
    finally:
        llm._step = step  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--case", nargs="+", default=["one", "16", "prompt"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cpu-isa", default="native")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    build.choose_instruction_set(options.cpu_isa)
    times = Times(time.thread_time if options.cpu_time else time.perf_counter)
    if options.cpu_time:
        torch.set_num_threads(1)
    llm = LLM(
        options.model,
        max_model_len=1024,
        max_num_seqs=64,
        enable_prefix_caching=False,
        enforce_eager=True,
        cpu_isa=options.cpu_isa,
        dtype=options.dtype,
        quantization=options.quantization,
    )
    llm.generate(prompts_of(1, 16, 0), SamplingParams(max_tokens=4), use_tqdm=False)  # type: ignore[arg-type]
    report = {case: show(case, measure(llm, case, times, options.steps)) for case in options.case}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


def show(case: str, steps: list[tuple[float, dict[str, list[float]]]]) -> dict[str, Any]:
    names = {name for _, kernels in steps for name in kernels}
    rows = []
    for name in names:
        seconds = statistics.median(kernels[name][0] if name in kernels else 0.0 for _, kernels in steps)
        rows.append((seconds, max(int(kernels[name][1]) for _, kernels in steps if name in kernels), name))
    inside = sum(seconds for seconds, _, _ in rows)
    whole = statistics.median(seconds for seconds, _ in steps)
    rest = statistics.median(seconds - sum(time for time, _ in kernels.values()) for seconds, kernels in steps)
    print(f"\n{case}: a step takes {whole * 1e3:.1f} ms, its kernels {inside * 1e3:.1f} ms")
    for seconds, calls, name in sorted(rows, reverse=True):
        if seconds < 0.002 * whole:
            continue
        rate = f"{products(name) * calls / seconds / 1e9:8.1f} GFLOP/s" if products(name) and seconds else ""
        print(f"  {name:46}{calls:5} {seconds * 1e3:9.2f} ms {seconds / whole:6.1%} {rate}")
    print(f"  {'the rest':46}      {rest * 1e3:9.2f} ms {rest / whole:6.1%}", flush=True)
    return {"step": whole, "rest": rest, "kernels": {name: seconds for seconds, _, name in rows}}


if __name__ == "__main__":
    main()
