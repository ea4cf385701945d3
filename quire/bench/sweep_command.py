"""`quire bench sweep`: the run of the command."""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from quire._version import __version__
from quire.platform.extras import install_command


def run(model: str | None, options: Mapping[str, Any], arguments: argparse.Namespace) -> int:
    """Run the sweep. Returns exit status 0, 1 if nothing could be measured, or 130 after Ctrl-C. options: of all
    servers.

    Raises ValueError for wrong flags."""
    for module in ("aiohttp", "matplotlib"):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise RuntimeError(f"quire bench sweep needs {module}: {install_command('bench')}") from error
    from quire.bench.sweep import Sweep

    a = arguments
    folder = Path(arguments.output_dir)
    slo = a.slo or []
    a.seed = options.get("seed", 0)
    a.num_prompts = a.num_prompts or (None if a.dataset_name == "custom" else 100)
    sweep = Sweep(model, options, a, folder, [limit.percentile for limit in slo])
    points = sweep.points
    folder.mkdir(parents=True, exist_ok=True)
    found = sweep.measured(points)
    left = [point for point in points if point.key not in found]
    if found:
        print(f"{len(found)} of {len(points)} points are in {folder} already", file=sys.stderr)
    interrupted = False
    hide = a.disable_tqdm or not sys.stderr.isatty()
    with tqdm(total=len(points), initial=len(found), unit="point", dynamic_ncols=True, disable=hide) as bar:
        try:
            sweep.run(left, partial(bar.set_postfix_str, refresh=True), lambda point: _count(bar, found, point))
        except KeyboardInterrupt:
            interrupted = True
    _report(sweep, [found.get(point.key, point) for point in points], slo)
    if interrupted:
        print(f"\nInterrupted: {len(found)} of {len(points)} points were measured. The same command goes on.")
        return 130
    return 0 if any(point.result for point in found.values()) else 1


def _count(bar: Any, found: dict[str, Any], point: Any) -> None:
    found[point.key] = point
    bar.update()


def _report(sweep: Any, points: list[Any], slo: list[Any]) -> None:
    from quire.bench import sweep_plot, sweep_report

    rows = sweep_report.rows_of(points)
    choice = sweep_report.choose(rows, slo)
    name = sweep.model or "the bundled model"
    print(f"{name}: {len(rows)} rows; times in ms\n\n{sweep_report.table(rows, slo, choice)}\n")
    print(sweep_report.advice(choice, slo, sweep.model, sweep.options))
    fixed = {name: value for name, value in sweep.options.items() if name != "hf_token"}
    facts = {"model": sweep.model, "version": __version__, "options": fixed}
    record = sweep_report.record(rows, slo, choice, **facts)
    (sweep.folder / "sweep.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if choice is not None:
        sweep_plot.plot(sweep.folder / "sweep.png", f"{name}, Quire {__version__}", rows, slo, choice)
    print(f"\nFiles in {sweep.folder}: results.jsonl (each run), sweep.json (this table), sweep.png")
