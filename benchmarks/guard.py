"""Checks whether one commit is faster or slower than another. Measures two commits of this project, interleaved.

    python benchmarks/guard.py                      # the last commit and the one before it
    python benchmarks/guard.py main my-branch       # any two
    python benchmarks/guard.py --rounds 9 --only single-bf16,batch-bf16

Each commit is checked out into a temporary folder and has its own process for each group of workloads. Both are loaded
at once, but only one of them runs at a time. A round runs every workload once on each commit, in an order that varies
between rounds. The result is the median of the rounds' ratios (new time / old time), its spread, and a verdict. A
difference counts if it is above 1 % and a paired permutation test of the rounds gives p < 0.05. Needs git, and the
dependencies of the two commits. Exit status: 1 if a workload is slower, else 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Eight of Qwen3-0.6B's 28 layers: all layers do the same work, and with eight a round takes only seconds.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "eos_token_id": 2,
}  # fmt: skip
SMALLEST_DIFFERENCE = 0.01
Requests = list[tuple[list[int], int]]  # (prompt token ids, tokens of output)


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(3, 4000) for _ in range(length)]


def single(rng: random.Random) -> Requests:
    return [(_prompt(rng, 64), 96)]


def batch(rng: random.Random) -> Requests:
    return [(_prompt(rng, 64), 48) for _ in range(16)]


def prompts(rng: random.Random) -> Requests:
    return [(_prompt(rng, 1024), 1) for _ in range(2)]


def mixed(rng: random.Random) -> Requests:
    return [(_prompt(rng, rng.randint(32, 384)), rng.randint(8, 64)) for _ in range(16)]


def prefix(rng: random.Random) -> Requests:
    document = _prompt(rng, 768)
    return [(document + _prompt(rng, 32), 16) for _ in range(8)]


def long_context(rng: random.Random) -> Requests:
    return [(_prompt(rng, 4096), 48)]


def many_small(rng: random.Random) -> Requests:
    return [(_prompt(rng, 16), 64) for _ in range(256)]


SHAPES = (single, batch, prompts, mixed, prefix, long_context)
# Workload -> (group, requests). A group is a process; its name identifies its model and options.
WORKLOADS: dict[str, tuple[str, Callable[[random.Random], Requests]]] = {
    **{f"{shape.__name__}-{dtype}": (dtype, shape) for dtype in ("bf16", "int8") for shape in SHAPES},
    "many_small-bundled": ("bundled", many_small),
}
OPTIONS: dict[str, dict[str, Any]] = {"bf16": {}, "int8": {"quantization": "int8"}, "bundled": {"max_num_seqs": 256}}


# ---- in a separate process, with the package of one commit


def work(group: str, model: str | None) -> None:
    """Load a model, then run the workloads named on standard input, and print their seconds."""
    from quire import LLM, SamplingParams

    options = dict(OPTIONS[group])
    if group != "bundled":
        import quire

        tokenizer = str(Path(quire.__file__).parent / "demo" / "model")
        options |= {
            "load_format": "dummy",
            "tokenizer": tokenizer,
            "max_model_len": 8192,
            "num_gpu_blocks_override": 2000,
        }
    llm = LLM(model, **options)
    for line in sys.stdin:
        order = json.loads(line)
        requests = WORKLOADS[order["workload"]][1](random.Random(order["seed"]))
        params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for _, n in requests]
        llm.reset_prefix_cache()
        started = time.perf_counter()
        llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
        print(json.dumps({"seconds": time.perf_counter() - started}), flush=True)


class Worker:
    """One commit's process for one group of workloads."""

    def __init__(self, checkout: Path, group: str, model: Path) -> None:
        command = [sys.executable, __file__, "--work", group, "--model", str(model)]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=checkout, env=environment
        )

    def run(self, workload: str, seed: int) -> float:
        """Run a workload. Returns its seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"workload": workload, "seed": seed}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"a process ended with status {self.process.wait()}")
        return float(json.loads(answer)["seconds"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def start(checkout: Path) -> float:
    """Return the seconds from the start of a process to the end of its first token."""
    command = [sys.executable, "-m", "quire", "generate", "--max-tokens", "1", "Once upon a time"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    started = time.perf_counter()
    subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def serve(checkout: Path) -> float:
    """Return the seconds from a server's start to its first healthy response."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "quire", "serve", "--port", port, "--log-level", "WARNING"]
    started = time.perf_counter()
    server = subprocess.Popen(command, cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)})
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            break
        except OSError:
            if server.poll() is not None:
                raise SystemExit(f"a server ended with status {server.returncode}") from None
            time.sleep(0.01)
    seconds = time.perf_counter() - started
    server.terminate()
    server.wait()
    return seconds


STARTS = {"start": start, "serve": serve}  # workloads that start a process with the bundled model


# ---- the comparison


@dataclass(frozen=True)
class Verdict:
    """The result of one workload. ratio: new time / old time, median of the rounds. lowest, highest: its spread."""

    ratio: float
    lowest: float
    highest: float
    p: float
    seconds: tuple[float, float]  # medians: old, new

    @property
    def word(self) -> str:
        if self.p >= 0.05 or abs(self.ratio - 1) < SMALLEST_DIFFERENCE:
            return "noise"
        return "faster" if self.ratio < 1 else "SLOWER"


def judge(old: list[float], new: list[float]) -> Verdict:
    """Compare paired rounds of the same workload.

    p: the probability that randomly swapping the members of pairs gives a difference at least as large; exact for up to
    12 rounds, otherwise estimated from 4,096 draws.
    """
    logs = [math.log(b / a) for a, b in zip(old, new, strict=True)]
    seen = abs(sum(logs))
    if len(logs) <= 12:
        signs: Any = itertools.product((1, -1), repeat=len(logs))
    else:
        rng = random.Random(0)
        signs = ([rng.choice((1, -1)) for _ in logs] for _ in range(4096))
    sums = [abs(sum(s * x for s, x in zip(row, logs, strict=True))) for row in signs]
    ratios = [math.exp(x) for x in logs]
    p = sum(total >= seen - 1e-12 for total in sums) / len(sums)
    medians = statistics.median(old), statistics.median(new)
    return Verdict(statistics.median(ratios), min(ratios), max(ratios), p, medians)


def compare(checkouts: tuple[Path, Path], model: Path, names: list[str], rounds: int) -> Iterator[tuple[str, Verdict]]:
    """Yield each workload's verdict as soon as it is known."""
    groups = {name: WORKLOADS[name][0] for name in names if name not in STARTS}
    for group in dict.fromkeys(groups.values()):
        workers = [Worker(checkout, group, model) for checkout in checkouts]
        for name in (name for name in names if groups.get(name) == group):
            yield name, judge(*_rounds(rounds, [lambda seed, w=w: w.run(name, seed) for w in workers]))  # noqa: B023
        for worker in workers:
            worker.close()
    for name in (name for name in names if name in STARTS):
        run = STARTS[name]
        yield name, judge(*_rounds(rounds, [lambda _, c=c, run=run: run(c) for c in checkouts]))  # type: ignore[misc]


def _rounds(rounds: int, sides: list[Callable[[int], float]]) -> list[list[float]]:
    """Return the seconds of old and new, without the warm-up round."""
    times: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            seconds = sides[side](number)
            if number:
                times[side].append(seconds)
    return times


@contextmanager
def checked_out(*commits: str) -> Iterator[tuple[Path, ...]]:
    """Check out the commits' files, each into a temporary folder."""
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory(prefix="quire-guard-") as folder:
        paths = []
        for index, commit in enumerate(commits):
            path = Path(folder, str(index))
            path.mkdir()
            archive = subprocess.run(["git", "archive", commit], cwd=root, check=True, stdout=subprocess.PIPE).stdout
            subprocess.run(["tar", "-x", "-C", str(path)], input=archive, check=True)
            paths.append(path)
        yield tuple(paths)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", default="HEAD~1")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--rounds", type=int, default=7, help="pairs for each workload; at least 6 to tell noise")
    parser.add_argument("--only", help="workloads, separated by commas: " + ", ".join([*WORKLOADS, *STARTS]))
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, None if arguments.work == "bundled" else arguments.model)
        return 0
    names = arguments.only.split(",") if arguments.only else [*WORKLOADS, *STARTS]
    if unknown := [name for name in names if name not in (*WORKLOADS, *STARTS)]:
        parser.error(f"no workload is called {unknown[0]!r}; there are: {', '.join([*WORKLOADS, *STARTS])}")
    began = time.perf_counter()
    verdicts = {}
    print(f"{arguments.old} -> {arguments.new}: seconds of either, new / old (lowest to highest of the rounds)")
    with checked_out(arguments.old, arguments.new) as (old, new), tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        for name, verdict in compare((old, new), Path(folder), names, arguments.rounds):
            verdicts[name] = verdict
            print(
                f"  {name:20} {verdict.seconds[0]:7.3f} {verdict.seconds[1]:7.3f}   {verdict.ratio:.3f}"
                f" ({verdict.lowest:.3f} to {verdict.highest:.3f})  p {verdict.p:.3f}  {verdict.word}",
                flush=True,
            )
    print(f"{time.perf_counter() - began:.0f} s, {arguments.rounds} rounds")
    if arguments.json:
        arguments.json.write_text(json.dumps({name: vars(verdict) for name, verdict in verdicts.items()}, indent=1))
    return int(any(verdict.word == "SLOWER" for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
