"""The plot of `quire plan --plot`: each layout's latencies under the traffic, and its maximum load."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: no display, no global state
from matplotlib.ticker import LogLocator, NullFormatter

from quire.bench.slo import METRICS
from quire.planner.plan import PERCENTILES, Load, Result, Task, best_of

_BLUE = "#2563a8"
_GREEN = "#2e8b57"
_RED = "#c22f2f"
_GREY = "#b9c4cf"


def plot(path: Path, title: str, task: Task, results: Sequence[Result]) -> None:
    """Write a PNG file."""
    shown = [(result, result.load) for result in results if result.load is not None]
    if not shown:
        raise ValueError(f"there is nothing to plot in {path}: no layout fits")
    height = 1.6 + 0.42 * len(shown)
    figure = Figure(figsize=(13, height), layout="constrained")
    figure.suptitle(f"{title} on {task.device.name}, {task.traffic.rate:,.3g} requests a second", fontsize=11)
    bears = any(result.breaking is not None for result in results)
    axes = figure.subplots(1, 3 if bears else 2, sharey=True, squeeze=False)[0]
    best = best_of(results, task.limits)
    for axis, metric in zip(axes, ("ttft", "itl"), strict=False):
        _latencies(axis, metric, task, [load for _, load in shown])
    if bears:
        _loads(axes[2], task, [result for result, _ in shown], best)
    names = [f"{result.layout}{' ★' if result is best else ''}" for result, _ in shown]
    axes[0].set_yticks(range(len(shown)), names)
    axes[0].invert_yaxis()
    for axis in axes:
        axis.grid(axis="x", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def _latencies(axis: Axes, metric: str, task: Task, loads: Sequence[Load]) -> None:
    """Draw a line from the median to p99 for each layout, and the limits."""
    for row, load in enumerate(loads):
        low, middle, high = (1e3 * load.latencies.percentiles[metric][p] for p in PERCENTILES)
        limits = [limit for limit in task.limits if limit.metric == metric]
        missed = any(load.latencies.percentiles[metric][limit.percentile] > limit.seconds for limit in limits)
        colour = _RED if missed else _BLUE
        axis.hlines(row, low, high, color=colour, lw=2.5, alpha=0.5)
        for value, marker in ((low, "o"), (middle, "|"), (high, "D")):
            axis.plot(value, row, marker, color=colour, ms=6)
    for limit in task.limits:
        if limit.metric == metric:
            axis.axvline(1e3 * limit.seconds, color=_RED, ls="--", lw=1, label=str(limit))
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set(title=f"{METRICS[metric].capitalize()}: p50 ●, p90 |, p99 ◆", xlabel="ms")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def _loads(axis: Axes, task: Task, results: Sequence[Result], best: Result | None) -> None:
    """Draw the highest load of each layout that meets the limits, next to the traffic's."""
    for row, result in enumerate(results):
        if result.breaking is None:
            axis.text(0, row, " none", va="center", fontsize=8, color=_RED)
            continue
        rate = result.breaking.rate
        axis.barh(row, rate, color=_GREEN if result is best else _GREY, height=0.6)
        label = f" {rate:,.3g}"
        if result.cost_at_breaking is not None:
            label += f", ${result.cost_at_breaking.per_million_output_tokens:.2f} a million output tokens"
        axis.text(0, row, label, va="center", fontsize=8, color="white" if result is best else "black", zorder=3)
    axis.axvline(task.traffic.rate, color=_BLUE, ls="--", lw=1, zorder=0, label="the traffic")
    axis.set(title="Highest load that meets all limits", xlabel="requests a second", xlim=(0, None), axisbelow=True)
    axis.legend(fontsize=8)
