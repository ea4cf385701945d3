"""Runs other projects' conformance suites against a running server, and counts the tests that pass.

    python -m venv suites && suites/bin/pip install llm-comply==0.5.0
    python benchmarks/conformance.py llm-comply --python suites/bin/python --url http://127.0.0.1:8000

    suites/bin/pip install pytest pytest-timeout filelock numpy openai requests wget
    python benchmarks/conformance.py llama.cpp --python suites/bin/python --url http://127.0.0.1:8000 \
        --path llama.cpp/tools/server/tests --parts chat_completion tool_call

The table conformance.toml explains why tests fail, or do not apply. The models that the suites request must be in the
server's --served-model-name. The exit status is 0 if each failure is in the table and, for llm-comply, each entry
occurs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TABLE: dict[str, Any] = tomllib.loads((HERE / "conformance.toml").read_text())
Counts = dict[str, int]  # passed, failed, not applicable


def llm_comply(python: Path, url: str) -> tuple[dict[str, Counts], list[str]]:
    """Return (counts of each API, failures missing from the table)."""
    counts: dict[str, Counts] = {}
    wrong: list[str] = []
    for api, model in TABLE["llm-comply"]["models"].items():
        command = [python, "-m", "llm_comply.cli", "--json", "--format", api, "--model", model]
        address = ["--base-url", f"{url}/v1", "--api-key", "key"]
        process = subprocess.run([*command, *address], capture_output=True, text=True, check=False)
        if not process.stdout:
            raise SystemExit(process.stderr)
        results = json.loads(process.stdout)["results"]
        statuses = (result["status"] for result in results)
        counts[api] = _count("not applicable" if status == "skipped" else status for status in statuses)
        errors = {
            f"{result['id']}: {error}"
            for result in results
            if result["status"] == "failed"
            for error in result["errors"]
        }
        entries = [entry for entry in TABLE["llm-comply"]["failures"] if entry["api"] == api]
        known = [entry["error"] for entry in entries]
        needed = [entry["error"] for entry in entries if not entry.get("optional")]
        wrong += [f"not expected: {api}, {error}" for error in sorted(errors) if not _matches(error, known)]
        wrong += [f"did not occur: {api}, {error}" for error in needed if not any(_matches(e, [error]) for e in errors)]
    return counts, wrong


def llama_cpp(python: Path, url: str, suite: Path, parts: Iterable[str]) -> tuple[dict[str, Counts], list[str]]:
    """Return (counts of each part, failures missing from the table)."""
    with tempfile.NamedTemporaryFile() as log:
        paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {
            "DEBUG_EXTERNAL": "1",
            "PORT": url.rsplit(":", 1)[1].rstrip("/"),
            "CONFORMANCE_LOG": log.name,
            "PYTHONPATH": paths,
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        pytest = [python, "-m", "pytest", "-q", "-p", "conformance_plugin", "-p", "no:cacheprovider"]
        files = [f"unit/test_{part}.py" for part in parts]
        subprocess.run(
            [*pytest, "--timeout", "300", *files], cwd=suite, env=environment, stdout=sys.stderr, check=False
        )
        results = [json.loads(line) for line in Path(log.name).read_text().splitlines()]
    counts: dict[str, list[str]] = {part: [] for part in parts}
    wrong: list[str] = []
    for result in results:
        part = result["id"].split(".py")[0].removeprefix("test_")
        verdict, reason = _verdict(result)
        counts[part].append(verdict)
        if verdict == "failed" and reason is None:
            wrong.append(f"not explained: {result['id']}: {result['error'].splitlines()[0][:200]}")
    return {part: _count(verdicts) for part, verdicts in counts.items()}, wrong


def _verdict(result: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return (passed, failed or not applicable; the table's reason)."""
    table = TABLE["llama-cpp"]
    for entry in table["not_applicable"]:
        if _concerns(entry, result):
            return "not applicable", entry["reason"]
    if result["outcome"] == "skipped":
        return "not applicable", None
    reasons = [entry["reason"] for entry in table["failures"] if _concerns(entry, result)]
    return result["outcome"], reasons[0] if reasons else None


def _concerns(entry: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    if set(entry.get("paths", ())) & set(result["paths"]):
        return True
    name = result["id"]
    is_named = _matches(name, entry.get("tests", ())) and not _matches(name, entry.get("except", ()))
    return is_named and entry.get("error", "") in result["error"]


def _matches(text: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(text, pattern.replace("[", "[[]")) for pattern in patterns)


def _count(verdicts: Iterable[str]) -> Counts:
    counts = dict.fromkeys(("passed", "failed", "not applicable"), 0)
    for verdict in verdicts:
        counts[verdict] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a conformance suite of another project against a server.")
    parser.add_argument("suite", choices=["llm-comply", "llama.cpp"])
    parser.add_argument("--python", type=Path, required=True, help="of the environment that has the suite's packages")
    parser.add_argument("--url", required=True, help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--path", type=Path, help="the folder tools/server/tests of llama.cpp")
    parser.add_argument("--parts", nargs="+", default=TABLE["llama-cpp"]["parts"], help="files of llama.cpp's tests")
    arguments = parser.parse_args()
    python = arguments.python.absolute()
    if arguments.suite == "llm-comply":
        counts, wrong = llm_comply(python, arguments.url)
    else:
        counts, wrong = llama_cpp(python, arguments.url, arguments.path, arguments.parts)
    print("| part | passed | failed | not applicable |\n|---|---|---|---|")
    for part, numbers in counts.items():
        print(f"| {part} | {' | '.join(str(number) for number in numbers.values())} |")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
