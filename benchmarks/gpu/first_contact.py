"""The sections of first_contact.sh: their order, time limits and dependencies. Each runs in its own process.

A section that fails or takes too long does not stop the others, except those that depend on it. After each section, the
results so far are in first-contact.json. The sections themselves are in contact_sections.py.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SECONDS = 545  # for all sections; first_contact.sh ends everything after 560
RESERVED = 12  # seconds for the archive
SLOWNESS = 12  # of the stand-in: kernels are compiled on CPUs
MOST_FILES = 8
MOST_BYTES = 64 * 2**20
FILE_BYTES = 16 * 2**20
Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Section:
    """needs: the sections without which this one would show nothing."""

    name: str
    seconds: int
    needs: tuple[str, ...] = ()


SECTIONS = [
    Section("start", 20),
    Section("machine", 25, ("start",)),
    Section("kernel cache", 60, ("start",)),
    Section("kernels", 45, ("start",)),
    Section("attention kernels", 45, ("start",)),
    Section("op tests", 45, ("start",)),
    Section("eager", 25, ("start",)),
    Section("graphs", 25, ("eager",)),
    Section("two steps in flight", 20, ("eager",)),
    Section("8B", 110, ("eager",)),
    Section("fp8", 55, ("eager",)),
    Section("libraries", 30, ("start",)),
    Section("tiles", 50, ("8B",)),
    Section("two ranks", 30, ("eager",)),
    Section("http", 30, ("eager",)),
    Section("sanitizer", 40, ("op tests",)),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stand-in", metavar="TARGET", help="rehearse on a simulated card, such as sm_90")
    parser.add_argument("--only", nargs="+", choices=[section.name for section in SECTIONS], metavar="SECTION")
    parser.add_argument("--seconds", type=float, help="the time for all sections")
    a = parser.parse_args()
    slowness = SLOWNESS if a.stand_in else 1
    options = [str(a.out), *(["--stand-in", a.stand_in] if a.stand_in else [])]
    chosen = [section for section in SECTIONS if not a.only or section.name in a.only]
    command = [sys.executable, str(HERE / "contact_sections.py"), *options]
    results = run(chosen, command, a.out / "first-contact.json", a.seconds or slowness * SECONDS, slowness)
    pack_kernels(a.out)
    print(report(results), flush=True)
    for line in check_files(a.out):
        print(line)
    return int(any(is_failed(result) for result in results.values()))


def run(sections: list[Section], command: list[str], saved: Path, seconds: float, slowness: float = 1) -> Results:
    """Run the sections one after the other. command: of a section, but for its name. saved: the file of the results.
    seconds: for all of them.
    """
    results: Results = {}
    deadline = time.monotonic() + seconds - RESERVED
    for section in sections:
        missing = [name for name in section.needs if name in results and is_failed(results[name])]
        left = deadline - time.monotonic()
        if missing:
            results[section.name] = {"skipped": f"{', '.join(missing)} failed"}
        elif left < 5:
            results[section.name] = {"skipped": "no time was left"}
        else:
            print(f"== {section.name}", flush=True)
            results[section.name] = run_section([*command, section.name], min(left, slowness * section.seconds))
        saved.write_text(json.dumps(results, indent=1))
    return results


def run_section(command: list[str], limit: float) -> dict[str, Any]:
    """Return the last result that a section prints within the limit. All its processes are ended."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    error = None
    try:
        printed, _ = process.communicate(timeout=limit)
        if process.returncode:
            error = f"ended with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        error = f"took more than {limit:.0f} s"
    _end_group(process.pid)
    if error is not None and process.returncode is None:
        printed, _ = process.communicate()
    result = last_result(printed)
    result["seconds"] = round(time.monotonic() - started, 1)
    return result if error is None else result | {"error": error}


def _end_group(group: int) -> None:
    """End the processes of a section, also those that it has left behind."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def last_result(printed: str) -> dict[str, Any]:
    """The last complete line of JSON that is an object. Other lines are copied to the log."""
    result: dict[str, Any] = {}
    for line in printed.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            print(line, flush=True)
            continue
        result = found if isinstance(found, dict) else result
    return result


def is_failed(result: dict[str, Any]) -> bool:
    return bool(result.get("failures")) or "error" in result or "skipped" in result


def pack_kernels(out: Path) -> None:
    """Archive the compiled kernels, so that a later machine need not compile them."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "quire"
    if folder.is_dir():
        with tarfile.open(out / "triton-cache.tar.xz", "w:xz", preset=0) as archive:
            archive.add(folder, "quire")


def check_files(out: Path) -> list[str]:
    """Remove what is over the limits of what comes back from a machine: the largest files first."""
    lines = []
    files = sorted((file for file in out.iterdir() if file.is_file()), key=lambda file: file.stat().st_size)
    while files and (
        len(files) > MOST_FILES
        or files[-1].stat().st_size > FILE_BYTES
        or sum(file.stat().st_size for file in files) > MOST_BYTES
    ):
        largest = files.pop()
        lines.append(f"removed {largest.name}, {largest.stat().st_size >> 20} MiB: more than comes back")
        largest.unlink()
    return lines


def report(results: Results) -> str:
    """One line for each section, then its failures and figures."""
    lines = ["", "| section | s | result |", "|---|---|---|"]
    details = []
    for name, result in results.items():
        failures = result.get("failures", {})
        outcome = result.get("error") or result.get("skipped") or (f"{len(failures)} failed" if failures else "passed")
        lines.append(f"| {name} | {result.get('seconds', '')} | {outcome} |")
        details += [f"{name}: {check}: {str(reason).splitlines()[0]}" for check, reason in failures.items()]
        figures = {key: value for key, value in result.items() if isinstance(value, int | float) and key != "seconds"}
        if figures:
            shown = (f"{key} {value:.4g}" for key, value in figures.items())
            details.append(f"{name}: {', '.join(shown)}")
    return "\n".join([*lines, "", *details])


if __name__ == "__main__":
    sys.exit(main())
