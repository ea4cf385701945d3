"""The plot of `quire bench sweep`: latency against throughput, a point for each row of the table."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: no display, no global state

from quire.bench.slo import PERCENTILE, Limit
from quire.bench.sweep import describe
from quire.bench.sweep_report import Choice, Row, worst_share

_RED = "#c22f2f"
_GREEN = "#2a8f4d"
_MOST_NAMED = 20  # servers in the legend


def plot(path: Path, title: str, rows: Sequence[Row], slo: Sequence[Limit], choice: Choice | None) -> None:
    """Write a PNG file. Lines join the loads of the same server. Points that miss the objectives are hollow."""
    servers: dict[str, list[Row]] = {}
    for row in rows:
        if row.result:
            servers.setdefault(json.dumps(row.options, sort_keys=True), []).append(row)
    named = min(len(servers), _MOST_NAMED)
    figure = Figure(figsize=(13, 5.5 + 0.22 * -(-named // 2)), layout="constrained")
    legend = "circle: recommended; filled: meets the SLO; " if slo else "circle: recommended; "
    figure.suptitle(f"{title}\n{legend}numbers: rows of the table", fontsize=10)
    left, right = figure.subplots(1, 2)
    colours = colormaps["turbo"](np.linspace(0.05, 0.92, max(len(servers), 1)))
    for axis, metric, name in ((left, "ttft", "time to first token"), (right, "itl", "inter-token latency")):
        percentile = next((limit.percentile for limit in slo if limit.metric == metric), PERCENTILE)
        key = f"p{percentile:g}_{metric}_ms"
        for colour, server in zip(colours, servers.values(), strict=True):
            _server(axis, key, server, slo, tuple(map(float, colour)))
        for limit in slo:
            if limit.metric == metric and limit.percentile == percentile:
                axis.axvline(1000 * limit.seconds, color=_RED, ls="--", lw=1.2, label=str(limit))
        if choice is not None and choice.row.result.get(key) is not None:
            axis.plot(
                choice.row.result[key],
                choice.row.result["output_throughput"],
                "o",
                ms=17,
                mfc="none",
                mec=_GREEN if choice.meets else _RED,
                mew=1.8,
            )
        axis.set(
            title=f"{name.capitalize()}, percentile {percentile:g}", xlabel="ms", ylabel="output tokens per second"
        )
        axis.set_ylim(bottom=0)
        values = [v for row in rows if (v := row.result.get(key))]
        if values and max(values) > 20 * min(values):
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
        else:
            axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if any(limit.metric == metric for limit in slo):
            axis.legend(handles=[line for line in axis.get_lines() if "≤" in str(line.get_label())], fontsize=8)
    handles = [line for line in left.get_lines() if "=" in str(line.get_label()) or line.get_label() == "defaults"]
    figure.legend(handles=handles[:_MOST_NAMED], loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def _server(axis: Axes, key: str, rows: Sequence[Row], slo: Sequence[Limit], colour: tuple[float, ...]) -> None:
    shown = [row for row in rows if row.result.get(key) is not None]
    x = [row.result[key] for row in shown]
    y = [row.result["output_throughput"] for row in shown]
    axis.plot(x, y, "-o", color=colour, ms=7, lw=1, label=describe(rows[0].options))
    for row, at, height in zip(shown, x, y, strict=True):
        if worst_share(slo, row.result) > 1:
            axis.plot(at, height, "o", color=colour, mfc="white", ms=7)
        axis.annotate(str(row.number), (at, height), xytext=(6, 5), textcoords="offset points", fontsize=8)
