"""All mechanisms by the names of their pages, each with its measuring and drawing functions.

A mechanism whose `measure` is None uses data from another benchmark, which is named in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.mechanisms import answers, cache, device, ranks, scheduling
from benchmarks.mechanisms.plot import Draw, picture

DATA = Path(__file__).parent / "data"
PICTURES = Path(__file__).parents[2] / "docs" / "images" / "mechanisms"
Measure = Callable[[], Any]


def _of(*modules: ModuleType) -> dict[str, tuple[Measure | None, Draw]]:
    """Return the functions draw_NAME of modules, in order, each with measure_NAME if it exists."""
    return {
        name.removeprefix("draw_").replace("_", "-"): (getattr(module, "measure_" + name[5:], None), draw)
        for module in modules
        for name, draw in vars(module).items()
        if name.startswith("draw_")
    }


MECHANISMS = _of(scheduling, cache, answers, device, ranks)


def drawn(name: str) -> str:
    """Draw the plot of a mechanism's data."""
    return picture(MECHANISMS[name][1], json.loads((DATA / f"{name}.json").read_text(encoding="utf-8")))
