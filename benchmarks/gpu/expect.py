"""Computes the minimum time for each GPU goal from the kernels compiled for each card.

    python -m benchmarks.gpu.expect [--cards H200 H100] [--json FILE] [--docs docs/gpu.md]

The engine runs on a simulated device (quire/cli/simulated_gpu.py). The work of each launch of a step is determined
(launches.py) and converted into seconds (model.py). A model is traced with one and with two layers; the difference is
one layer, which is multiplied by the model's number of layers.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.model import Work, estimate
from benchmarks.gpu.published import KERNELS
from benchmarks.gpu.rates import (
    ASSUMPTIONS,
    CACHED_KERNEL,
    COMPILED_KERNEL,
    HOST_GRAPH,
    HOST_IMPORT,
    HOST_OPERATION,
    HOST_REQUEST,
    HOST_STEP,
    HOST_TRITON,
    HOST_VIEW,
    RATES,
    Rates,
)

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "<!-- expected -->"
END = "<!-- end of expected -->"
CARDS = ("H200", "H100", "B200", "A100")
MODELS = {"llama-3-8b": 32, "qwen3-0.6b": 28}  # layers
REQUESTS = (1, 16, 64, 128, 256)  # requests in a step; 256 requests run at first, and fewer as some end
PROMPTS = (8, 512)  # requests and tokens of a step with prompts only
CONTEXT = 576  # tokens of a request in decoding steps: half of nano-vllm's longest prompt and output
STREAM = 320  # the same for one stream


@dataclass
class Kernel:
    """A kernel of a figure. seconds: the time of all its launches in a step."""

    name: str
    seconds: float
    bound: str
    share: float
    launches: float


@dataclass
class Figure:
    """value, goal: in `unit`; a negative goal is the largest allowed value. kernels: those of a step."""

    value: float
    goal: float | None
    unit: str
    kernels: list[Kernel] = field(default_factory=list)
    note: str = ""


@dataclass
class Traced:
    """The launches of a step, with the number of times that each work occurs. host: seconds that the host needs without
    a graph."""

    launches: dict[Work, float] = field(default_factory=dict)
    host: float = 0.0


# ---- the stand-in


def trace(cards: list[str]) -> dict[str, dict[str, Any]]:
    """Return the launches of all figures on cards of the same capability, and the number of kernels compiled when an
    engine starts. The process must not have imported the engine.
    """
    from benchmarks.gpu.tracing import stand_in

    warnings.simplefilter("ignore")
    found: dict[str, dict[str, Any]] = {card: {} for card in cards}
    with stand_in(RATES[cards[0]].card) as device:
        import torch

        from benchmarks import gpu_figures as figures
        from benchmarks.gpu.launches import Step, is_free, plans_of, works
        from quire import LLM, SamplingParams

        gpu = torch.device("cuda", 0)

        def collect(name: str, launches: list[Any], step: Step) -> None:
            step = replace(step, plans=step.plans or plans_of(launches))
            for card in cards:
                traced = found[card][name] = Traced()
                for launch in launches:
                    free = is_free(launch)
                    is_triton = launch.kernel is not None
                    traced.host += HOST_TRITON if is_triton else HOST_VIEW if free else HOST_OPERATION
                    for work in works(launch, RATES[card], step):
                        key = replace(work, lanes=Lanes(work.lanes))
                        traced.launches[key] = traced.launches.get(key, 0.0) + 1

        def attention(name: str, launches: list[Any], step: Step) -> None:
            """The last attention, without its plan, which all layers of a model share."""
            kernels = [launch for launch in launches if launch.kernel is not None]
            last = [i for i, launch in enumerate(kernels) if "attend" in launch.name][-1]
            after = [launch for launch in kernels[last + 1 :] if "merge" in launch.name][:1]
            collect(name, [kernels[last], *after], replace(step, plans=plans_of(kernels)))

        with device.traced() as launches:
            figures.decoding(gpu, 64, 4096, 32, 8)
        attention("decode attention", launches, Step((1,) * 64, (4096,) * 64))
        for heads, name in ((32, "prefill attention"), (8, "prefill attention, GQA")):
            with device.traced() as launches:
                figures.prompts(gpu, 2, 8192, 32, heads)
            attention(name, launches, Step((8192,) * 2, (8192,) * 2))

        for name in MODELS:
            for layers in (1, 2):
                figures.SHAPES[name]["num_hidden_layers"] = layers
                before = len(device.compilations)
                with tempfile.TemporaryDirectory() as folder:
                    path = figures.write_shape(Path(folder), name)
                    llm = LLM(
                        str(path), load_format="dummy", device="cuda", enforce_eager=True, enable_prefix_caching=False
                    )
                for card in cards:
                    started = found[card].get(f"{name}, compilations", 0)
                    found[card][f"{name}, compilations"] = max(started, len(device.compilations) - before)
                cases = [
                    ("one stream", 1, 1, 0.0),
                    *((f"{n} requests", n, 1, 0.6) for n in REQUESTS),
                    ("prompts", *PROMPTS, 0.6),
                ]
                for case, requests, tokens, temperature in cases:
                    prompts = [[7] * (tokens if tokens > 1 else 16)] * requests
                    params = SamplingParams(temperature=temperature, max_tokens=1 if tokens > 1 else 5, ignore_eos=True)
                    with device.traced() as launches:
                        llm.generate(prompts, params, use_tqdm=False)
                    starts = [i for i, launch in enumerate(launches) if launch.name.startswith("aten.embedding")]
                    if tokens > 1:
                        part = launches[starts[0] :]
                        lengths = (tokens,) * requests
                    else:
                        part = launches[starts[-2] : starts[-1]]
                        lengths = (CONTEXT if temperature else STREAM,) * requests
                    collect(f"{name}, {case}, {layers}", part, Step((tokens,) * requests, lengths))
    return found


class Lanes(dict[str, float]):
    """Lanes of Work that can be part of a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def traced(cards: list[str]) -> dict[str, dict[str, Any]]:
    """Return the launches of all figures on each card, traced by one process per capability."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = (
        "import pathlib, pickle, sys; from benchmarks.gpu import expect; "
        "pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(expect.trace(sys.argv[2:])))"
    )
    found: dict[str, dict[str, Any]] = {}
    for capability in dict.fromkeys(RATES[card].card.capability for card in cards):
        same = [card for card in cards if RATES[card].card.capability == capability]
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "traced"
            subprocess.run([sys.executable, "-c", code, str(output), *same], check=True, env=environment, cwd=ROOT)
            found |= pickle.loads(output.read_bytes())
    return {card: found[card] for card in cards}


def whole(found: dict[str, Any], name: str, case: str) -> Traced:
    """Return a step of the whole model, extrapolated from steps with one and with two layers."""
    one, two = (found[f"{name}, {case}, {layers}"] for layers in (1, 2))
    more = MODELS[name] - 1
    launches = {
        work: one.launches.get(work, 0.0) + (two.launches.get(work, 0.0) - one.launches.get(work, 0.0)) * more
        for work in {**one.launches, **two.launches}
    }
    return Traced(launches, one.host + (two.host - one.host) * more)


def outside(found: dict[str, Any], name: str, case: str) -> float:
    """Return the host seconds of a step outside the layers, which are not part of a graph."""
    one, two = (found[f"{name}, {case}, {layers}"] for layers in (1, 2))
    return float(2 * one.host - two.host)


# ---- figures


def kernels(traced: Traced, rates: Rates) -> list[Kernel]:
    """Launches with the same name share a row. The longest rows come first."""
    rows: dict[str, Kernel] = {}
    for work, count in traced.launches.items():
        found = estimate(work, rates)
        row = rows.setdefault(work.name, Kernel(work.name, 0.0, found.bound, 0.0, 0.0))
        row.seconds += found.seconds * count
        row.share += found.share * found.seconds * count
        row.launches += count
    for row in rows.values():
        row.share /= max(row.seconds, 1e-12)
    return sorted((row for row in rows.values() if row.launches), key=lambda row: -row.seconds)


def seconds(rows: list[Kernel]) -> float:
    return sum(row.seconds for row in rows)


def figures(card: str, found: dict[str, Any]) -> dict[str, Figure]:
    from benchmarks.gpu_figures import SHAPES, weight_bytes

    rates = RATES[card]
    result = {}
    rows = kernels(found["decode attention"], rates)
    size = 64 * 4096 * 8 * 128 * 2 * 2
    share = 100 * size / seconds(rows) / rates.memory_bandwidth
    result["decode attention, 64 x 4096"] = Figure(share, 85, "% of measured bandwidth", rows)
    operations = 4 * 2 * 32 * 8192**2 * 128 / 2
    for name in ("prefill attention", "prefill attention, GQA"):
        rows = kernels(found[name], rates)
        goal = 400.0 if rates.tensor > 800e12 else None  # an A100 has 312
        result[f"{name}, 2 x 8192"] = Figure(operations / seconds(rows) / 1e12, goal, "TFLOP/s", rows)
    for name, layers in MODELS.items():
        shape = {**SHAPES[name], "num_hidden_layers": layers}
        step = whole(found, name, "one stream")
        rows = kernels(step, rates)
        each = max(seconds(rows), _host(found, name, "one stream", 1))
        limit = weight_bytes(shape) / rates.memory_bandwidth
        is_large = name == "llama-3-8b"
        result[f"{name}, one stream"] = Figure(
            1 / each,
            None if is_large else 700,
            "tok/s",
            rows,
            f"{sum(row.launches for row in rows):.0f} launches a step",
        )
        result[f"{name}, one stream, share of its limit"] = Figure(100 * limit / each, 75 if is_large else None, "%")
        eager = max(each, step.host + HOST_STEP)
        result[f"{name}, graphs against eager"] = Figure(eager / each, None if is_large else 1.7, "times")
        result[f"{name}, 256 requests"] = _many(found, name, rates)
        for case, count in (("one stream", 1), ("256 requests", 256)):
            device = seconds(kernels(whole(found, name, case), rates))
            host = _host(found, name, case, count)
            result[f"{name}, {case}, device idle"] = Figure(
                100 * max(0.0, 1 - device / host), -3, "%", note=f"host {host * 1e3:.2f} ms a step"
            )
        start = HOST_IMPORT + _captures() * 2 * step.host
        count = found[f"{name}, compilations"]
        result[f"{name}, ready"] = Figure(
            start + count * CACHED_KERNEL,
            -15,
            "s",
            note=f"{start + count * COMPILED_KERNEL:.0f} s if its {count} kernels are not in the cache",
        )
    return result


def _host(found: dict[str, Any], name: str, case: str, requests: int) -> float:
    """Return the host seconds of a step with graphs."""
    return outside(found, name, case) + HOST_GRAPH + HOST_STEP + requests * HOST_REQUEST


def _captures() -> int:
    """Return the number of sizes captured as graphs at start."""
    from quire.worker.graphs import DECODE_SIZES, MIXED_SIZES

    return len(DECODE_SIZES) + len(MIXED_SIZES)


def _many(found: dict[str, Any], name: str, rates: Rates) -> Figure:
    """Return the figures of nano-vllm's benchmark: 256 requests, whose number falls as they finish."""
    draw = random.Random(0)
    prompts = [draw.randint(100, 1024) for _ in range(256)]
    outputs = [draw.randint(100, 1024) for _ in range(256)]
    times = {
        n: max(seconds(kernels(whole(found, name, f"{n} requests"), rates)), _host(found, name, f"{n} requests", n))
        for n in REQUESTS
    }
    prompt = seconds(kernels(whole(found, name, "prompts"), rates)) / (PROMPTS[0] * PROMPTS[1])
    total = prompt * sum(prompts)
    for at in range(max(outputs)):
        active = sum(length > at for length in outputs)
        total += times[min(n for n in REQUESTS if n >= active)]  # steps are padded to the next size
    rows = kernels(whole(found, name, "256 requests"), rates)
    note = f"a step of 256: {times[256] * 1e3:.2f} ms; prompts: {1 / prompt:.0f} tok/s"
    return Figure(sum(outputs) / total, None, "tok/s", rows, note)


# ---- reports


def verdict(figure: Figure) -> str:
    """A negative goal is the largest allowed value."""
    if figure.goal is None:
        return ""
    met = figure.value <= -figure.goal if figure.goal < 0 else figure.value >= figure.goal
    return "met" if met else "missed"


def shown(card: str, result: dict[str, Figure], count: int = 8) -> str:
    lines = []
    for name, figure in result.items():
        lines.append(f"{card}: {name}: {figure.value:.4g} {figure.unit} {verdict(figure)} {figure.note}")
        whole_step = max(seconds(figure.kernels), 1e-12)
        lines += [
            f"    {row.name:30} {row.launches:5.0f} x {row.seconds / row.launches * 1e6:8.2f} µs "
            f"{row.seconds / whole_step:4.0%}  {row.bound:12}{row.share:4.0%} of the roofline"
            for row in figure.kernels[:count]
        ]
    return "\n".join(lines)


def document(results: dict[str, dict[str, Figure]]) -> str:
    """Return the tables of docs/gpu.md."""
    cards = list(results)
    lines = ["| figure | goal | " + " | ".join(cards) + " |", "|---|---|" + "---|" * len(cards)]
    for name, figure in results[cards[0]].items():
        goal = next((results[card][name].goal for card in cards if results[card][name].goal is not None), None)
        sign = "" if goal is None else f"≥ {goal:g}" if goal > 0 else f"≤ {-goal:g}"
        cells = []
        for card in cards:
            value = (
                f"{results[card][name].value:.3g}"
                if results[card][name].value < 1000
                else f"{results[card][name].value:,.0f}"
            )
            cells.append(f"**{value}**" if verdict(results[card][name]) == "missed" else value)
        lines.append(f"| {name}, {figure.unit} | {sign} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "A value in bold misses its goal. The kernels of each figure on the first card:",
        "",
        "| figure | kernel | launches | µs each | share of the step | bound | share of the roofline |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, figure in results[cards[0]].items():
        for row in figure.kernels[:6]:
            lines.append(
                f"| {name} | {row.name} | {row.launches:.0f} | {row.seconds / row.launches * 1e6:.1f} | "
                f"{row.seconds / seconds(figure.kernels):.0%} | {row.bound} | {row.share:.0%} |"
            )
    lines += [
        "",
        "What the model predicts for published kernels, with the same assumptions:",
        "",
        "| kernel | card | published, µs | predicted, µs | error | source |",
        "|---|---|---|---|---|---|",
    ]
    for kernel in KERNELS:
        predicted = kernel.predicted().seconds + kernel.overhead
        lines.append(
            f"| {kernel.name} | {kernel.card} | {kernel.seconds * 1e6:.0f} | {predicted * 1e6:.0f} | "
            f"{kernel.error():+.0%} | {kernel.source} |"
        )
    lines += [
        "",
        "What is assumed. The first run on a card confirms or refutes each:",
        "",
        "| assumption | value | source |",
        "|---|---|---|",
    ]
    lines += [f"| {what} | {value} | {source} |" for what, value, source in ASSUMPTIONS]
    return "\n".join(lines)


def write_document(path: Path, text: str) -> None:
    before, rest = path.read_text().split(BEGIN, 1)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", nargs="+", default=CARDS, choices=list(RATES))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--docs", type=Path, help="write the tables between the markers of this file")
    arguments = parser.parse_args()
    results: dict[str, dict[str, Figure]] = {}
    for card, found in traced(list(arguments.cards)).items():
        results[card] = figures(card, found)
        print(shown(card, results[card]), flush=True)
    if arguments.json:
        data = {card: {name: asdict(figure) for name, figure in result.items()} for card, result in results.items()}
        arguments.json.write_text(json.dumps(data, indent=1, default=float) + "\n")
    if arguments.docs:
        write_document(arguments.docs, document(results))


if __name__ == "__main__":
    main()
