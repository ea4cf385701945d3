"""The plot of `quire bench serve --plot`: distributions, requests over time, throughput."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # no pyplot: no display, no global state

from quire.bench.report import METRICS, running, samples, token_times
from quire.bench.serve import Outcome

_BLUE = "#2563a8"
_ORANGE = "#e08a1e"
_RED = "#c22f2f"
_GREY = "#b9c4cf"
_ABOVE: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": 3, "frameon": False, "fontsize": 8}


def plot(path: Path, title: str, outcomes: Sequence[Outcome], duration: float, goodput: dict[str, float]) -> None:
    """Write a PNG file. goodput: limits in milliseconds, drawn as lines."""
    figure = Figure(figsize=(13, 10), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplot_mosaic([["ttft", "itl", "e2el"], ["requests"] * 3, ["rate"] * 3], height_ratios=[3, 4, 2.5])
    values = samples(outcomes)
    for name, metrics in (("ttft", ["ttft"]), ("itl", ["itl", "tpot"]), ("e2el", ["e2el"])):
        _distributions(axes[name], {metric: values[metric] for metric in metrics if values[metric]}, goodput)
        heading = " and ".join(METRICS[metric] for metric in metrics)
        axes[name].set(title=heading.capitalize(), xlabel="ms", ylabel="share of samples", ylim=(0, 1.02))
    _requests(axes["requests"], sorted(outcomes, key=lambda outcome: outcome.start))
    _throughput(axes["rate"], outcomes, duration)
    for axis in axes.values():
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for name in ("requests", "rate"):
        axes[name].set(xlabel="s", xlim=(0, duration))
    figure.savefig(path, dpi=110)


def _distributions(axis: Axes, values: dict[str, list[float]], goodput: dict[str, float]) -> None:
    for (metric, sample), colour in zip(values.items(), (_BLUE, _ORANGE), strict=False):
        label = f"{metric.upper()}: median {np.median(sample):,.1f}, p99 {np.percentile(sample, 99):,.1f} ms"
        shares = np.arange(1, len(sample) + 1) / len(sample)
        axis.step(np.sort(sample), shares, where="post", color=colour, lw=1.6, label=label)
        if metric in goodput:
            axis.axvline(goodput[metric], color=_RED, ls="--", lw=1, label=f"SLO {goodput[metric]:g} ms")
        if metric == "itl" and max(sample) > 20 * np.median(sample) > 0:
            axis.set_xscale("log")
        elif metric in ("ttft", "e2el"):
            axis.set_xlim(left=0)
    if values:
        axis.legend(fontsize=8, loc="lower right")


def _requests(axis: Axes, outcomes: Sequence[Outcome]) -> None:
    starts = np.array([o.start for o in outcomes])
    ends = np.array([o.start + o.latency for o in outcomes])
    firsts = np.array([o.start + o.ttft for o in outcomes])
    failed = np.array([bool(o.error) for o in outcomes])
    y = np.arange(len(outcomes))
    width = float(np.clip(220 / len(outcomes), 0.6, 5))
    axis.hlines(y[~failed], starts[~failed], firsts[~failed], color=_GREY, lw=width, label="until the first token")
    axis.hlines(y[~failed], firsts[~failed], ends[~failed], color=_BLUE, lw=width, label="streaming")
    if failed.any():
        axis.hlines(y[failed], starts[failed], ends[failed], color=_RED, lw=width)
        axis.plot(ends[failed], y[failed], "x", color=_RED, ms=5, label="failed")
    axis.set(title="Requests, in the order of their start", ylabel="request", ylim=(len(outcomes) - 0.5, -0.5))
    axis.legend(**_ABOVE)


def _throughput(axis: Axes, outcomes: Sequence[Outcome], duration: float) -> None:
    edges = np.linspace(0, duration, 61)
    times, weights = token_times([o for o in outcomes if not o.error])
    rate = np.histogram(times, edges, weights=weights)[0] / np.diff(edges)
    axis.stairs(rate, edges, fill=True, color=_BLUE, alpha=0.35, label="output tokens per second")
    axis.set(title="Throughput and concurrency", ylabel="tokens/s")
    right = axis.twinx()
    moments, count = running(outcomes)
    right.step([*moments, duration], [*count, 0], where="post", color=_ORANGE, lw=1.4, label="requests running")
    right.set(ylabel="requests", ylim=(0, None))
    handles = [*axis.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    right.legend(handles=handles, **_ABOVE)
