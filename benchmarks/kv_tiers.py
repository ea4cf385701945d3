"""Measures the gains and costs of tiers beyond the KV cache.

    python -m benchmarks.kv_tiers                      # three rounds, about ten minutes on two cores
    python -m benchmarks.kv_tiers --rounds 1 --conversations 6 --folder /some/disk

Engines with Qwen3-0.6B's shapes and random weights run in this process: one without tiers, one with CPU memory, one
with a disk. They alternate in a varying order. The KV cache of each holds a third of the conversations.

conversations   each conversation has about 2,000 tokens and grows by 64 tokens. First one after the other (time to
                first token), then all at once with 16 tokens of output each (turns a second).
nothing found   texts of 512 tokens that are never repeated, with 32 tokens of output, eight at a time: the cost of
                saving blocks that are never reused, in seconds and in CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.guard import CONFIG
from quire import LLM, SamplingParams
from quire.checkpoints.hub import bundled_model

PROMPT, NEXT, OUTPUT = 2000, 64, 16  # tokens
BLOCK = 16
LAYERS = 28


def engine(directory: Path, conversations: int, **options: Any) -> LLM:
    longest = PROMPT + 16 * NEXT
    return LLM(
        str(directory),
        load_format="dummy",
        max_model_len=longest,
        max_num_seqs=8,
        num_gpu_blocks_override=1 + conversations // 3 * (longest // BLOCK),
        kv_cache_pretouch=True,
        **options,
    )


class Texts:
    """Random tokens, the same for all engines."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return [self._dice.randrange(100, 4000) for _ in range(count)]


def first_tokens(llm: LLM, prompts: list[list[int]]) -> float:
    """Return the median seconds to the first token of the prompts."""
    seconds = []
    params = SamplingParams(max_tokens=1, temperature=0)
    for prompt in prompts:
        started = time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def together(llm: LLM, prompts: list[list[int]], output: int) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process."""
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    cpu = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started, time.process_time() - cpu


def settle(llm: LLM) -> None:
    """Wait until the computed blocks have been saved, as they would be between two turns of a conversation."""
    if (transfers := llm.core.scheduler.transfers) is not None:
        while transfers._moving:
            time.sleep(0.01)
            llm.core.scheduler.open_gates()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--folder", help="where the disk tier is made (default: the folder for temporary files)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        directory = Path(folder) / "model"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": LAYERS}))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(bundled_model() / name, directory)
        disk = Path(folder) / "blocks"
        gib = 2 * options.conversations * (PROMPT + 16 * NEXT) * LAYERS * 2 * 8 * 128 * 2 / 2**30
        engines = {
            "none": engine(directory, options.conversations),
            "memory": engine(directory, options.conversations, kv_offloading_size=gib),
            "disk": engine(directory, options.conversations, kv_offloading_path=str(disk)),
        }
        measured: dict[str, dict[str, list[float]]] = {name: {} for name in engines}

        def note(name: str, what: str, value: float) -> None:
            measured[name].setdefault(what, []).append(value)

        texts = Texts(0)
        conversations = [texts.tokens(PROMPT) for _ in range(options.conversations)]
        for llm in engines.values():
            first_tokens(llm, conversations)
            settle(llm)
        for number in range(options.rounds):
            order = list(engines)[number % 3 :] + list(engines)[: number % 3]
            for conversation in conversations:
                conversation += texts.tokens(NEXT)
            for name in order:
                note(name, "ttft", first_tokens(engines[name], conversations))
                settle(engines[name])
            for conversation in conversations:
                conversation += texts.tokens(NEXT)
            for name in order:
                seconds, _ = together(engines[name], conversations, OUTPUT)
                note(name, "turns", options.conversations / seconds)
                settle(engines[name])
            new = [texts.tokens(512) for _ in range(16)]
            for name in order:
                started = time.perf_counter()
                cpu = time.process_time()
                together(engines[name], new, 32)
                settle(engines[name])
                note(name, "new", time.perf_counter() - started)
                note(name, "new cpu", time.process_time() - cpu)
            print(f"round {number + 1}", {n: {k: round(v[-1], 2) for k, v in m.items()} for n, m in measured.items()})
    print(
        "| tier | time to first token, s | of none | turns/s | of none | nothing found, s | of none | CPU s | of none |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, values in measured.items():
        cells = [name]
        for what in ("ttft", "turns", "new", "new cpu"):
            ratio = median(a / b for a, b in zip(values[what], measured["none"][what], strict=True))
            cells += [f"{median(values[what]):.2f}", f"{ratio:.3f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
