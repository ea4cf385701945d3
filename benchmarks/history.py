"""Measures how fast Quire was at earlier commits, with the workloads of guard.py.

    python benchmarks/history.py --out DIR a1b2c3d e4f5a6b ...      # commits, the oldest first

Each commit is interleaved with HEAD (guard.py), so that a slow period of the machine affects both. history.json in DIR
keeps the measurements: run the same command again to resume. Workloads that a commit cannot run are omitted. Draws
history.png: a small plot for each workload.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import guard
from matplotlib.figure import Figure
from tqdm import tqdm

BLUE = "#2563a8"
GRAY = "#999999"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="workloads of guard.py, separated by commas")
    a = parser.parse_args()
    names = [*filter(None, a.only.split(","))] or [*guard.WORKLOADS, *guard.STARTS]
    a.out.mkdir(parents=True, exist_ok=True)
    kept = a.out / "history.json"
    figures: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for commit in tqdm(a.commits, desc="commits", file=sys.stderr):
        figures.setdefault(commit, {"date": _git("show", "-s", "--format=%cs", commit), "speeds": {}})
        speeds = figures[commit]["speeds"]
        missing = [name for name in names if name not in speeds]
        with guard.checked_out(commit, "HEAD") as checkouts, tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(guard.CONFIG))
            for name in missing:
                speeds[name] = _speed(checkouts, Path(folder), name, a.rounds)
                kept.write_text(json.dumps(figures, indent=1))
    draw(a.out / "history.png", {commit: figures[commit] for commit in a.commits}, names)


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def _speed(checkouts: tuple[Path, ...], model: Path, name: str, rounds: int) -> float:
    """Return the speed of the first checkout relative to the second; NaN if it cannot run the workload."""
    try:
        [(_, verdict)] = guard.compare((checkouts[0], checkouts[1]), model, [name], rounds)
    except (SystemExit, OSError, subprocess.CalledProcessError) as problem:
        print(f"{name}: {problem}", file=sys.stderr)
        return math.nan
    return verdict.ratio  # HEAD's seconds / the commit's seconds


def draw(path: Path, figures: dict[str, Any], names: list[str]) -> None:
    rows = -(-len(names) // 4)
    figure = Figure(figsize=(11, 2.1 * rows + 0.6), layout="constrained")
    places = [*range(len(figures)), len(figures)]
    labels = [*(entry["date"][5:] for entry in figures.values()), "now"]
    for axis, name in zip(figure.subplots(rows, 4, sharex=True).flat, names, strict=False):
        speeds = [*(entry["speeds"].get(name, math.nan) for entry in figures.values()), 1.0]
        axis.axhline(1, color=GRAY, linewidth=0.8)
        axis.plot(places, speeds, "o-", color=BLUE, markersize=3)
        axis.set_title(name, fontsize=9)
        axis.set_ylim(0, 1.25 * max(1.0, *(speed for speed in speeds if not math.isnan(speed))))
        axis.set_xticks(places, labels, rotation=90, fontsize=7)
        axis.tick_params(axis="y", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in [*figure.axes][len(names) :]:
        axis.set_axis_off()
    figure.suptitle("Speed at earlier commits, as a share of today's", fontsize=11)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
