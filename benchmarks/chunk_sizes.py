"""Shows how step size (--max-num-batched-tokens, --max-itl) affects throughput and the stalls caused by long prompts.

    python benchmarks/chunk_sizes.py --model DIR --out DIR [--chunks 64 128 256 512 1024] [--max-itl 100 400]

For each setting, interleaved: the mixed workload's seconds, and the largest gap between tokens of 8 streams while a
prompt of 4,096 tokens arrives. Prints a table of medians, and writes it with the numbers and a plot to --out.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm

from quire import LLM
from quire.bench.claims import Sizes, _steps, _whale_among_streams, mixed
from quire.scheduler.pace import Pace

BLUE = "#2563a8"
ORANGE = "#e08a1e"
DEFAULT = 512  # tokens of a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint directory; the bundled model if left out")
    parser.add_argument("--out", type=Path, required=True, help="folder for chunk-sizes.json and chunk-sizes.png")
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048, 4160])
    parser.add_argument("--max-itl", type=int, nargs="*", default=[100, 200, 400, 800], help="milliseconds")
    parser.add_argument("--requests", type=int, default=12, help="of the mixed workload")
    parser.add_argument("--whale", type=int, default=4096, help="tokens of the prompt that arrives among the streams")
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()

    sizes = Sizes(rounds=a.rounds, mixed=a.requests, whale=a.whale)
    options: dict[str, Any] = {"max_model_len": a.whale + 256, "max_num_seqs": 64, "num_gpu_blocks_override": 2500}
    if a.model is None:
        options["hf_overrides"] = {"max_position_embeddings": a.whale + 256}
    llm = LLM(a.model, max_num_batched_tokens=max(a.chunks), enable_prefix_caching=False, **options)
    limits = llm.core.scheduler.limits
    fixed = {f"{chunk:,}": replace(limits, max_num_batched_tokens=chunk) for chunk in a.chunks}
    paces = {f"{ms} ms": replace(limits, max_num_batched_tokens=DEFAULT, pace=Pace(ms / 1000)) for ms in a.max_itl}
    settings = fixed | paces
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    gaps: dict[str, list[float]] = {name: [] for name in settings}
    tokens = sum(len(prompt) + output for prompt, output in mixed(llm, 2, a.requests))
    for number in tqdm(range(a.rounds + 1), desc="rounds, the first to warm up", file=sys.stderr):
        for name, setting in settings.items():
            llm.core.scheduler.limits = setting
            started = time.perf_counter()
            for _ in _steps(llm, mixed(llm, 2, a.requests if number else 2)):
                pass
            taken = time.perf_counter() - started
            gap = _whale_among_streams(llm, random.Random(number), sizes)[0]
            if number:
                seconds[name].append(taken)
                gaps[name].append(gap)
    rates = {name: tokens / median(times) for name, times in seconds.items()}
    waits = {name: median(times) for name, times in gaps.items()}
    best = max(rates.values())
    print(f"{a.model or 'bundled model'}, {llm.dtype}, {a.requests} mixed requests, medians of {a.rounds} rounds\n")
    print("| step | tokens/s, in and out | of the best | largest gap of 8 streams |\n|---|---|---|---|")
    for name in settings:
        label = f"{name} tokens" if name in fixed else f"--max-itl {name.split()[0]}"
        print(f"| {label} | {rates[name]:,.0f} | {rates[name] / best:.1%} | {waits[name] * 1e3:,.0f} ms |")
    a.out.mkdir(parents=True, exist_ok=True)
    result = {"date": str(date.today()), "model": str(a.model), "seconds": seconds, "gaps": gaps, "tokens": tokens}
    (a.out / "chunk-sizes.json").write_text(json.dumps(result, indent=1))
    draw(a.out / "chunk-sizes.png", rates, waits, {"tokens a step": list(fixed), "--max-itl": list(paces)}, a.whale)


def draw(path: Path, rates: dict[str, float], waits: dict[str, float], lines: dict[str, list[str]], whale: int) -> None:
    """Plot throughput against the largest gap: a line of points for each way to choose the size of a step."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for (label, names), color in zip(lines.items(), (BLUE, ORANGE), strict=True):
        places = [(waits[name] * 1e3, rates[name]) for name in names]
        axis.plot(*zip(*places, strict=True), "o-", color=color, label=label) if places else None
        for name, place in zip(names, places, strict=True):
            axis.annotate(name, place, textcoords="offset points", xytext=(0, 8), ha="center", color=color)
    axis.set(
        xscale="log",
        xlabel=f"largest gap of 8 streams while {whale:,} tokens arrive, ms",
        ylabel="tokens/s, mixed workload",
    )
    axis.set_title("Short steps keep streams going, long ones compute prompts faster")
    axis.set_ylim(0, 1.15 * max(rates.values()))
    axis.legend(frameon=False, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
