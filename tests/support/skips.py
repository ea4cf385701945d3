"""Which tests were skipped, and why: every run ends with a list. `pytest --expected-skips FILE` fails if it has grown.

FILE is in TOML: `skips` is a list of tables, each of which allows the skips of some tests for one reason.

    skips = [
        {tests = "tests/ops/test_amx.py", reason = "this processor has no AMX", most = 4},
    ]

A test is covered if its name begins with `tests` and its reason is `reason`, where * stands for any text. `most` is the
number of tests that may be skipped so. A module that is skipped as a whole counts as one test.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

SHOWN = 20  # names of unexpected skips
FIELDS = {"tests": str, "reason": str, "most": int}


@dataclass(frozen=True)
class Skip:
    """name: the node ID of a test or of a module."""

    name: str
    reason: str


@dataclass(frozen=True)
class Expected:
    tests: str
    reason: str
    most: int

    def covers(self, skip: Skip) -> bool:
        pattern = re.escape(self.reason).replace(r"\*", ".*")
        return skip.name.startswith(self.tests) and re.fullmatch(pattern, skip.reason, re.DOTALL) is not None


def read(path: Path) -> list[Expected]:
    """Raises pytest.UsageError if the file cannot be read or has another form."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"--expected-skips {path}: {error}") from error
    if set(table) != {"skips"}:
        raise pytest.UsageError(f"--expected-skips {path}: it must have the key skips and no other")
    for entry in table["skips"]:
        if {name: type(value) for name, value in entry.items()} != FIELDS:
            raise pytest.UsageError(f"--expected-skips {path}: {entry} must have tests, reason and most, a number")
    return [Expected(**entry) for entry in table["skips"]]


def unexpected(skips: Iterable[Skip], expected: list[Expected]) -> list[Skip]:
    """Those that no entry covers, or whose entries are used up."""
    left = [entry.most for entry in expected]
    found = []
    for skip in skips:
        number = next((i for i, entry in enumerate(expected) if left[i] and entry.covers(skip)), None)
        if number is None:
            found.append(skip)
        else:
            left[number] -= 1
    return found


class Skips:
    """In the process that prints: collects the skips from the reports, which come from all processes."""

    def __init__(self, expected: list[Expected] | None) -> None:
        self.expected = expected
        self.found: dict[str, str] = {}  # the reason of each test or module

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "wasxfail"):
            self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple | list) else str(report.longrepr)
            self.found[report.nodeid] = reason.removeprefix("Skipped: ")

    def unexpected(self) -> list[Skip]:
        skips = [Skip(name, reason) for name, reason in sorted(self.found.items())]
        return [] if self.expected is None else unexpected(skips, self.expected)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.lines():
            terminalreporter.write_line(line)
        if new := self.unexpected():
            terminalreporter.write_sep("=", "unexpected skips", red=True)
            for line in complaint(new):
                terminalreporter.write_line(line, red=True)

    def lines(self) -> Iterable[str]:
        if not self.found:
            return
        reasons: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for name, reason in self.found.items():
            reasons[reason][name.partition("::")[0]] += 1
        yield ""
        yield f"Skipped: {len(self.found)}"
        for reason, files in sorted(reasons.items(), key=lambda row: (-sum(row[1].values()), row[0])):
            yield f"{sum(files.values()):6}  {_one_line(reason)}  ({', '.join(sorted(files))})"


def complaint(new: list[Skip]) -> Iterable[str]:
    yield f"{len(new)} more than --expected-skips allows:"
    yield from (f"  {skip.name}: {_one_line(skip.reason)}" for skip in new[:SHOWN])
    if len(new) > SHOWN:
        yield f"  and {len(new) - SHOWN} others"
    yield "Install what they need. If they cannot run here at all, allow them in that file:"
    places = Counter((skip.name.partition("::")[0], skip.reason) for skip in new)
    for (file, reason), count in places.items():
        yield f"    {{tests = {json.dumps(file)}, reason = {json.dumps(reason)}, most = {count}}},"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--expected-skips", metavar="FILE", help="fail if tests are skipped that this file does not allow")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--expected-skips")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Skips(read(Path(path)) if path else None))
