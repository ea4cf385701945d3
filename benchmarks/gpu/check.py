"""Compiles the kernels that engines would launch on GPUs, and checks their machine code. No GPU is needed.

    python -m benchmarks.gpu.check everything without a result (about two hours)
    python -m benchmarks.gpu.check --cards sm_90 --only llama-3-8b      one card; cases whose name contains a text
    python -m benchmarks.gpu.check --triton /path           a folder with another Triton
    python -m benchmarks.gpu.check --list                   the cases, without running them
    python -m benchmarks.gpu.check --report                 only write the table in docs/gpu.md

A case is an engine: a card, a model's shape and options. It runs in its own process, starts, and processes requests
that launch every kind of kernel. `rules.py` checks each compiled kernel. Results are appended to a JSON-lines file, one
line per finished case. A case runs again only if the rules, Triton, or the source of one of its kernels changed. A new
kernel does not invalidate the results of engines that do not launch it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case, all_cases
from benchmarks.gpu.report import failures, write_report
from benchmarks.gpu.tracing import TracedStandIn, stand_in
from quire.config.declaration import ConfigError
from quire.platform.gpu.cards import CARDS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/gpu-compiled.jsonl"
KERNELS = ("quire/ops/triton/*.py",)
JUDGES = ("quire/ops/triton/tiles.py", "quire/attention/tiles.py", "benchmarks/gpu/rules.py")  # of all kernels
_DEFINITION = re.compile(r"^def (\w+)\(", re.MULTILINE)
_IMPORTS = re.compile(rb"^(from|import) .*\n", re.MULTILINE)  # files may move
_IMPORT = re.compile(r"^from quire.ops.triton\.(\w+) import", re.MULTILINE)
TIME_LIMIT = 1800  # seconds per case

Result = dict[str, Any]


@cache
def _files() -> dict[str, set[Path]]:
    """Return the files that define a function of this name, together with the kernel files that they import."""
    files: dict[str, set[Path]] = defaultdict(set)
    for path in (path for pattern in KERNELS for path in ROOT.glob(pattern)):
        text = path.read_text()
        imported = {ROOT / f"quire/ops/triton/{name}.py" for name in _IMPORT.findall(text)}
        for name in _DEFINITION.findall(text):
            files[name] |= {path, *imported}
    return files


def key(result: Result) -> str:
    """Return a digest of the result's inputs. A result is valid as long as this is unchanged."""
    digest = hashlib.sha256(f"{result['case']} {result['triton']}".encode())
    paths = {ROOT / name for name in JUDGES}.union(*(_files()[kernel["name"]] for kernel in result["kernels"]))
    for path in sorted(paths):
        digest.update(_IMPORTS.sub(b"", path.read_bytes()))
    return digest.hexdigest()[:12]


def is_valid(result: Result | None) -> bool:
    return result is not None and result["state"] != "crashed" and result["key"] == key(result)


def stored(path: Path) -> dict[tuple[str, str], Result]:
    """Return the newest result of each case, by its name and the version of Triton."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {(result["case"], result["triton"]): result for result in map(json.loads, lines)}


def save(path: Path, results: Iterable[Result]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_text("".join(json.dumps(result) + "\n" for result in results))
    temporary.replace(path)


# ---- one case, in its own process


def run_case(case: Case, device: TracedStandIn) -> Result:
    """Run a case. Returns its outcome, whose state is done, refused (a ValueError at start, such as ConfigError) or
    crashed."""
    from benchmarks.gpu.engine import serve, start
    from benchmarks.gpu.rules import judged

    result: Result = {"state": "done", "kernels": [], "while_serving": []}
    with tempfile.TemporaryDirectory() as folder, device.traced() as launches:
        try:
            llm = start(case, Path(folder))
            at_start = set(device.compilations)
            serve(llm, Path(folder))
            result["while_serving"] = sorted(set(device.compilations) - at_start)
        except ConfigError as error:
            result |= {"state": "refused", "reason": str(error)[:300]}
        except Exception:
            result |= {"state": "crashed", "reason": traceback.format_exc()[-1500:]}
    kernels = {launch.kernel.hash: launch for launch in launches if launch.kernel is not None}
    result["kernels"] = [judged(launch, device.card) for launch in kernels.values()]
    return result


# ---- all cases


def run_apart(case: Case, triton: str | None) -> Result:
    paths = [str(ROOT), *([triton] if triton else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "benchmarks.gpu.check", "--case", case.name]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIME_LIMIT, env=environment, cwd=ROOT, check=False
        )
        lines = done.stdout.splitlines()
        result: Result = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
        if done.returncode or not result:
            result = {"state": "crashed", "reason": done.stderr[-1500:], "kernels": [], "while_serving": []}
    except subprocess.TimeoutExpired:
        result = {"state": "crashed", "reason": f"longer than {TIME_LIMIT} s", "kernels": [], "while_serving": []}
    return result | {"seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="run only cases whose name contains this text")
    parser.add_argument("--cards", nargs="+", default=["sm_90", "sm_80", "sm_100", "sm_120"], help="default: all four")
    parser.add_argument("--triton", help="a folder with another Triton, put in front of Python's path")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no further case after so many minutes")
    parser.add_argument("--jobs", type=int, default=2, help="cases that run at once; default: 2")
    parser.add_argument("--list", action="store_true", help="only print the cases")
    parser.add_argument("--report", action="store_true", help="only write the report")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = {case.name: case for case in all_cases(options.cards)}
    if options.case:
        warnings.simplefilter("ignore")
        case = Case.parse(options.case)
        with stand_in(CARDS[case.card]) as device:
            print(json.dumps(run_case(case, device)))
        return
    chosen = [case for name, case in cases.items() if all(text in name for text in options.only)]
    if options.list:
        print("\n".join(case.name for case in chosen))
        return
    if not options.report:
        run_all(chosen, options.triton, options.results, options.minutes, options.jobs)
    write_report(list(stored(options.results).values()), ROOT / "docs/gpu.md")


def run_all(cases: list[Case], triton: str | None, path: Path, minutes: float, jobs: int) -> None:
    begun = time.perf_counter()
    version = _triton_version(triton)
    results = stored(path)
    missing = [case for case in cases if not is_valid(results.get((case.name, version)))]
    print(f"Triton {version}: {len(cases)} cases, {len(cases) - len(missing)} of them done before", flush=True)

    def run(case: Case) -> Result | None:
        if time.perf_counter() - begun > 60 * minutes:
            return None
        begin = {"case": case.name, "card": case.card, "model": str(case.model), "triton": version}
        result = begin | run_apart(case, triton)
        return result | {"key": key(result)}

    with ThreadPoolExecutor(jobs) as pool:
        ends = as_completed([pool.submit(run, case) for case in missing])
        for number, result in enumerate((end.result() for end in ends), 1):
            if result is None:
                print(f"{len(missing) - number + 1} cases are left for the next run")
                pool.shutdown(cancel_futures=True)
                return
            results[(result["case"], version)] = result
            save(path, results.values())
            found = failures(result)
            state = result["state"] if result["state"] != "done" else f"{len(found)} failures" if found else "passed"
            left = (time.perf_counter() - begun) / number * (len(missing) - number) / 60
            print(
                f"[{number}/{len(missing)}, {left:.0f} min left] {result['case']}: {state} "
                f"({len(result['kernels'])} kernels, {result['seconds']:.0f} s)",
                flush=True,
            )
            for line in found[:12]:
                print(f"    {line}", flush=True)


def _triton_version(folder: str | None) -> str:
    environment = os.environ | ({"PYTHONPATH": folder} if folder else {})
    command = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


if __name__ == "__main__":
    main()
