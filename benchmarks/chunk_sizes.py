"""What the size of a prefill chunk (--max-num-batched-tokens) does to throughput, and to streams beside a long prompt.

    python benchmarks/chunk_sizes.py --model DIR --out DIR [--chunks 64 128 256 512 1024 2048 4160]

For each size, in turns: the mixed workload's seconds, and the largest gap between tokens of 8 streams while a prompt of
4,096 tokens arrives. Prints a table of medians, and writes it with the numbers and a picture to --out.
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
from quire_bench.claims import Sizes, _steps, _whale_among_streams, mixed

BLUE, ORANGE = "#2563a8", "#e08a1e"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint directory; the bundled model if left out")
    parser.add_argument("--out", type=Path, required=True, help="folder for chunk-sizes.json and chunk-sizes.png")
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048, 4160])
    parser.add_argument("--requests", type=int, default=12, help="of the mixed workload")
    parser.add_argument("--whale", type=int, default=4096, help="tokens of the prompt that arrives among the streams")
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()

    sizes = Sizes(rounds=a.rounds, mixed=a.requests, whale=a.whale)
    options: dict[str, Any] = {"max_model_len": a.whale + 256, "max_num_seqs": 64, "num_gpu_blocks_override": 2500}
    if a.model is None:
        options["hf_overrides"] = {"max_position_embeddings": a.whale + 256}
    llm = LLM(a.model, max_num_batched_tokens=max(a.chunks), enable_prefix_caching=False, **options)
    seconds: dict[int, list[float]] = {chunk: [] for chunk in a.chunks}
    gaps: dict[int, list[float]] = {chunk: [] for chunk in a.chunks}
    tokens = sum(len(prompt) + output for prompt, output in mixed(llm, 2, a.requests))
    for number in tqdm(range(a.rounds + 1), desc="rounds, the first to warm up", file=sys.stderr):
        for chunk in a.chunks:
            llm.core.scheduler.limits = replace(llm.core.scheduler.limits, max_num_batched_tokens=chunk)
            started = time.perf_counter()
            for _ in _steps(llm, mixed(llm, 2, a.requests if number else 2)):
                pass
            taken = time.perf_counter() - started
            gap = _whale_among_streams(llm, random.Random(number), sizes)[0] if number else 0.0
            if number:
                seconds[chunk].append(taken)
                gaps[chunk].append(gap)
    rates = {chunk: tokens / median(times) for chunk, times in seconds.items()}
    waits = {chunk: median(times) for chunk, times in gaps.items()}
    best, most = max(rates.values()), max(rates, key=lambda chunk: rates[chunk])
    print(f"{a.model or 'bundled model'}, {llm.dtype}, {a.requests} mixed requests, medians of {a.rounds} rounds\n")
    print("| chunk | tokens/s, in and out | of the best | largest gap of 8 streams |\n|---|---|---|---|")
    for chunk in a.chunks:
        print(f"| {chunk:,} | {rates[chunk]:,.0f} | {rates[chunk] / best:.1%} | {waits[chunk] * 1e3:,.0f} ms |")
    a.out.mkdir(parents=True, exist_ok=True)
    result = {"date": str(date.today()), "model": str(a.model), "seconds": seconds, "gaps": gaps, "tokens": tokens}
    (a.out / "chunk-sizes.json").write_text(json.dumps(result, indent=1))
    draw(a.out / "chunk-sizes.png", rates, waits, f"The best throughput is at {most:,} tokens a step", a.whale)


def draw(path: Path, rates: dict[int, float], waits: dict[int, float], title: str, whale: int) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    axis.plot(list(rates), list(rates.values()), "o-", color=BLUE, label="tokens per second, mixed workload")
    axis.set(xscale="log", xlabel="tokens a step (--max-num-batched-tokens)", ylabel="tokens/s", title=title)
    axis.set_ylim(0, 1.1 * max(rates.values()))
    axis.set_xticks(list(rates), [f"{chunk:,}" for chunk in rates])
    axis.minorticks_off()
    right = axis.twinx()
    label = f"largest gap of 8 streams while {whale:,} tokens arrive"
    right.plot(list(waits), [wait * 1e3 for wait in waits.values()], "s--", color=ORANGE, label=label)
    right.set(ylabel="ms", yscale="log")
    right.set_yticks([wait * 1e3 for wait in waits.values()], [f"{wait * 1e3:,.0f}" for wait in waits.values()])
    right.minorticks_off()
    lines = [*axis.get_lines(), *right.get_lines()]
    axis.legend(lines, [str(line.get_label()) for line in lines], frameon=False, loc="lower right")
    axis.spines["top"].set_visible(False)
    right.spines["top"].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
