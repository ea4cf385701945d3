"""Measures the cost of structured outputs: 16 requests with a JSON schema and the same number of tokens without one.

    python benchmarks/structured.py --model SmolLM2.gguf [--rounds 7] [--json FILE]
    python benchmarks/structured.py --model SmolLM2.gguf --qwen     # Qwen3-0.6B's shapes with the model's tokenizer

Runs with masks only and with masks and jump-ahead alternate, each compared with plain requests that generate as many
tokens. Prints the median of the throughput ratios (above 1: the constrained requests are faster), by wall time and by
processor time, which other programs disturb less, and the wall time of a step.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from benchmarks.guard import CONFIG
from quire import LLM, SamplingParams
from quire.bench.claims import ARTICLES, with_schema, without_schema
from quire.structured.guidance import GuidanceMatcher


def make_llm(model: str, qwen: bool) -> LLM:
    options: dict[str, Any] = {"max_num_seqs": len(ARTICLES), "max_model_len": 1024, "enable_prefix_caching": False}
    if not qwen:
        return LLM(model, **options)
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name)
    (path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 28}))
    return LLM(folder.name, tokenizer=model, load_format="dummy", dtype="bfloat16", **options)


@dataclass(frozen=True)
class Run:
    wall: float  # seconds
    processors: float  # processor seconds of all threads
    steps: int
    tokens: list[int]  # by request


def run(llm: LLM, params: list[SamplingParams]) -> Run:
    steps = llm.core.scheduler._num_steps
    processors = time.process_time()
    wall = time.perf_counter()
    outputs = llm.generate(ARTICLES, params, use_tqdm=False)
    wall = time.perf_counter() - wall
    processors = time.process_time() - processors
    tokens = [len(output.outputs[0].token_ids) for output in outputs]
    return Run(wall, processors, llm.core.scheduler._num_steps - steps, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", required=True, help="a model that Quire runs; with --qwen, only its tokenizer is used"
    )
    parser.add_argument("--qwen", action="store_true", help="dummy weights in Qwen3-0.6B's shapes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    llm = make_llm(arguments.model, arguments.qwen)
    structured = [with_schema(seed) for seed in range(len(ARTICLES))]

    def constrained(jump_ahead: bool) -> Run:
        if jump_ahead:
            return run(llm, structured)
        with mock.patch.object(GuidanceMatcher, "forced", return_value=[]):
            return run(llm, structured)

    def plain(counts: list[int]) -> Run:
        return run(llm, [without_schema(seed, count) for seed, count in enumerate(counts)])

    names = {False: "masks alone", True: "masks and jump-ahead"}
    counts = {jump_ahead: constrained(jump_ahead).tokens for jump_ahead in names}  # this also compiles the grammar
    plain(counts[True])
    pairs: dict[bool, list[tuple[Run, Run]]] = {jump_ahead: [] for jump_ahead in names}
    for _ in range(arguments.rounds):
        for jump_ahead in random.sample([False, True], 2):
            if random.random() < 0.5:
                free = plain(counts[jump_ahead])
                pairs[jump_ahead].append((free, constrained(jump_ahead)))
            else:
                bound = constrained(jump_ahead)
                pairs[jump_ahead].append((plain(counts[jump_ahead]), bound))
    result = {}
    for jump_ahead, runs in pairs.items():
        free, bound = runs[0]
        numbers = {
            "throughput": median(free.wall / bound.wall for free, bound in runs),
            "throughput by processor time": median(free.processors / bound.processors for free, bound in runs),
            "milliseconds a step": 1e3 * median(bound.wall / bound.steps for _, bound in runs),
            "milliseconds a plain step": 1e3 * median(free.wall / free.steps for free, _ in runs),
        }
        result[names[jump_ahead]] = numbers
        print(f"{names[jump_ahead]}: {sum(bound.tokens)} tokens in {bound.steps} steps; plain: {free.steps} steps")
        for name, value in numbers.items():
            print(f"  {name:30} {value:8.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
