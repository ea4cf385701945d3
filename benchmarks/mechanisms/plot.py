"""The style of the plots. Equal data give equal files."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib as mpl

mpl.use("svg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE = "#3b6fb6"
ORANGE = "#e08a2e"
GREEN = "#3c9a5f"
RED = "#c2504a"
VIOLET = "#7d5fb2"
GREY = "#9aa5b1"
COLORS = [BLUE, ORANGE, GREEN, VIOLET, RED, GREY]
STYLE = {
    "svg.fonttype": "none",  # text, which can be searched and read aloud
    "svg.hashsalt": "quire",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#4a5568",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.titlesize": 10,
    "axes.prop_cycle": mpl.cycler(color=COLORS),
    "grid.color": "#e2e8f0",
    "legend.frameon": False,
}
Draw = Callable[[Any, Figure], None]


def picture(draw: Draw, data: Any) -> str:
    """Return an SVG of the data."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.2), layout="constrained", facecolor="white")
        draw(data, figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def axes(figure: Figure, x: str, y: str, title: str = "", place: tuple[int, int, int] = (1, 1, 1)) -> Axes:
    part = figure.add_subplot(*place)
    part.set_xlabel(x)
    part.set_ylabel(y)
    if title:
        part.set_title(title, loc="left")
    return part


def label_bars(part: Axes, texts: list[str] | None = None, form: str = "{:,.0f}") -> None:
    """Label each bar with its number."""
    for bars in part.containers:
        part.bar_label(bars, labels=texts, fmt=form, padding=2, fontsize=8.5)  # type: ignore[arg-type]
