"""Measures the cost of a long prompt: how close it comes to the rate of its products, and the cost per further token.

    python benchmarks/long_prompt.py --model DIR [--tokens 6000] [--longest 32768] [--rounds 3] --out DIR

Each round computes one prompt of --tokens, between two measurements of the model's own products with 512 rows, which
give the attainable rate. Then a prompt of --longest tokens is computed once, and the seconds of each of its steps are
plotted. Products cost the same for every token, attention grows with the number of previous tokens, and nothing else
should grow.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, median

import torch
from matplotlib.figure import Figure
from side_by_side_limits import Model
from tqdm import tqdm

from quire import LLM
from quire.bench.claims import _steps
from quire.ops.cpu.linear import linear_cpu

MERGED = {"queries, keys and values": ("q_proj", "k_proj", "v_proj"), "gate and up": ("gate_proj", "up_proj")}
ROWS = 512  # of a step, and of the measured products
BLUE = "#2563a8"
ORANGE = "#e08a1e"
GREY = "#666666"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint directory of a dense model in bfloat16")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--longest", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="folder for long-prompt.json and long-prompt.png")
    a = parser.parse_args()

    length = max(a.longest, a.tokens) + 2
    llm = LLM(a.model, max_num_seqs=1, max_model_len=length, max_num_batched_tokens=ROWS, enable_prefix_caching=False)
    model = Model(Path(a.model))
    products = Products(merged_shapes(model))
    per_token = 2 * model.product_parameters
    attention = 4 * model.layers * model.config["num_attention_heads"] * model.head_dim  # per previous token

    rounds = []
    for _ in tqdm(range(a.rounds), desc="rounds", file=sys.stderr):
        before = products.rate()
        seconds = sum(step_seconds(llm, a.tokens))
        possible = (before + products.rate()) / 2
        reached = (per_token * a.tokens + attention * a.tokens * (a.tokens + 1) / 2) / seconds
        rounds.append({"seconds": seconds, "possible": possible, "reached": reached, "share": reached / possible})
    middle = {key: median(one[key] for one in rounds) for key in rounds[0]}
    print(f"{a.tokens:,} tokens: {middle['seconds']:.1f} s, {middle['reached'] / 1e9:,.0f} GFLOP/s;", end=" ")
    print(f"products alone {middle['possible'] / 1e9:,.0f} GFLOP/s: {middle['share']:.1%} (medians of {a.rounds})")

    steps = step_seconds(llm, a.longest)
    costs = [seconds / ROWS for seconds in steps[: a.longest // ROWS]]
    places = [ROWS * (number + 0.5) for number in range(len(costs))]
    slope, start = line(places, costs)
    rate = attention / slope
    furthest = max(abs(cost - start - slope * place) / cost for place, cost in zip(places, costs, strict=True))
    print(
        f"{a.longest:,} tokens: {sum(steps):.1f} s; a token costs {start * 1e3:.2f} ms, and {slope * 1e6:.3f} ms more"
    )
    print(
        f"for each 1,000 tokens before it (attention at {rate / 1e9:,.0f} GFLOP/s); steps differ from this by at",
        end=" ",
    )
    print(f"most {furthest:.1%}")
    a.out.mkdir(parents=True, exist_ok=True)
    result = {
        "date": str(date.today()),
        "model": a.model,
        "rounds": rounds,
        "steps": steps,
        "slope": slope,
        "start": start,
    }
    (a.out / "long-prompt.json").write_text(json.dumps(result, indent=1))
    draw(a.out / "long-prompt.png", places, costs, start, slope)


def merged_shapes(model: Model) -> list[tuple[int, int]]:
    """Return [out, in] of each product of a layer; products with the same input are merged."""
    shapes: dict[str, tuple[int, int]] = {}
    for name, shape in model.shapes.items():
        if ".layers.0." in name and len(shape) == 2:
            part = next((key for key, names in MERGED.items() if name.split(".")[-2] in names), name)
            out, in_ = shape
            shapes[part] = (shapes.get(part, (0, in_))[0] + out, in_)
    return list(shapes.values())


class Products:
    """Products of the given shapes, with their own weights."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        self._inputs = {in_: torch.randn(ROWS, in_).bfloat16() for _, in_ in shapes}
        self._weights = [(linear_cpu.pack(torch.randn(*shape).bfloat16()), *shape) for shape in shapes]

    def rate(self) -> float:
        """Return operations per second."""
        started = time.perf_counter()
        for _ in range(6):
            for weight, _, in_ in self._weights:
                linear_cpu(self._inputs[in_], weight, None)
        return 6 * 2 * ROWS * sum(out * in_ for _, out, in_ in self._weights) / (time.perf_counter() - started)


def step_seconds(llm: LLM, tokens: int) -> list[float]:
    """Return the seconds of each step of a prompt of the given length, up to its first token."""
    rng = random.Random(tokens)
    times = [time.perf_counter()]
    for _ in _steps(llm, [([rng.randint(3, 4000) for _ in range(tokens)], 1)]):
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def line(places: list[float], values: list[float]) -> tuple[float, float]:
    """Return (slope, value at zero) of the least-squares line."""
    slope, start = linear_regression(places, values)
    return slope, start


def draw(path: Path, places: list[float], costs: list[float], start: float, slope: float) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    thousands = [place / 1000 for place in places]
    axis.fill_between(thousands, 0, [start * 1e3] * len(places), color=BLUE, alpha=0.25, lw=0, label="products")
    axis.fill_between(
        thousands,
        start * 1e3,
        [(start + slope * place) * 1e3 for place in places],
        color=ORANGE,
        alpha=0.25,
        lw=0,
        label="attention",
    )
    axis.plot(thousands, [cost * 1e3 for cost in costs], ".", color=GREY, label="measured, a step of 512 tokens")
    axis.set(
        xlabel="thousand tokens before",
        ylabel="ms a token",
        title="A token of a long prompt costs its products, and attention to all before",
    )
    axis.set_ylim(0)
    axis.set_xlim(0)
    axis.legend(frameon=False, loc="upper left")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
