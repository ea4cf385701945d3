"""What tests cost: `pytest --costs` prints the most expensive tests and fixtures, and the cost of each directory.

A cost is processor time (user + system, in seconds) of the process that runs the test and of all processes below it,
whether they have ended or still run. So it hardly depends on what else runs on the machine. What a server computes is
charged to the test during which it computes it, its start to the fixture that starts it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
MOST_EXPENSIVE = 50


class Processes:
    """This process and those below it. Linux lists children quickly but sometimes leaves one out, so each descendant is
    remembered until it is reaped. Then its time is in that of its parent."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def seconds(self) -> float:
        """Of this process and its threads, the descendants that it has waited for, and those that run."""
        for pid in ["self", *self._known]:
            self._known.update(_descendants(pid))
        total = 0.0
        family = {os.getpid(), *self._known}
        for pid in list(self._known):
            parent, seconds = _stat(pid)
            if parent in family:
                total += seconds
            else:  # it has been reaped, or has lost its parent
                self._known.discard(pid)
        return total + sum(os.times()[:4])


PROCESSES = Processes()


def _descendants(pid: int | str) -> Iterable[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        found = [Path(f"/proc/{pid}/task/{thread}/children").read_text().split() for thread in threads]
    except OSError:  # it has just ended
        return
    for child in map(int, itertools.chain(*found)):
        yield child
        yield from _descendants(child)


def _stat(pid: int) -> tuple[int, float]:
    """(parent, seconds) of a process; the parent is 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0, 0.0
    return int(fields[1]), sum(map(int, fields[11:15])) / TICKS  # utime, stime, cutime, cstime


class Meter:
    """In each process that runs tests: attaches costs to the reports, which travel to the process that prints."""

    def __init__(self) -> None:
        self.nested = [0.0]  # of the fixtures set up so far within the phase, or within each fixture being set up
        self.fixtures: list[tuple[str, float]] = []
        self.last: float | None = None  # seconds at the end of the phase before
        self.cost = 0.0

    def _phase(self) -> Generator[None, Any, Any]:
        """From the end of the phase before, so that what pytest does between them counts, too."""
        before = PROCESSES.seconds() if self.last is None else self.last
        self.nested, self.fixtures = [0.0], []
        try:
            return (yield)
        finally:
            self.last = PROCESSES.seconds()
            self.cost = max(self.last - before, 0.0)

    pytest_runtest_setup = pytest.hookimpl(wrapper=True, tryfirst=True)(_phase)
    pytest_runtest_call = pytest.hookimpl(wrapper=True, tryfirst=True)(_phase)
    pytest_runtest_teardown = pytest.hookimpl(wrapper=True, tryfirst=True)(_phase)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = PROCESSES.seconds()
        self.nested.append(0.0)
        try:
            return (yield)
        finally:
            total = max(PROCESSES.seconds() - before, 0.0)  # less: a killed process left nothing to its parent
            own = max(total - self.nested.pop(), 0.0)
            self.nested[-1] += total
            self.fixtures.append((f"{fixturedef.baseid or 'conftest'}::{fixturedef.argname}", own))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        report.user_properties.append(("costs", {"seconds": self.cost, "fixtures": list(self.fixtures)}))
        return report


def _without_group(nodeid: str) -> str:
    """xdist appends the group of a test to its name."""
    name, _, group = nodeid.rpartition("@")
    return nodeid if not name or "]" in group else name


class Table:
    """In the process that prints: adds up the costs of the reports."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.tests: dict[str, float] = defaultdict(float)
        self.fixtures: dict[str, list[float]] = defaultdict(list)
        self.begin = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "costs" and report.when in ("setup", "call", "teardown"):
                costs = value
        seconds = costs["seconds"]
        for fixture, own in costs["fixtures"]:
            self.fixtures[fixture].append(own)
            seconds -= own
        self.tests[_without_group(report.nodeid)] += max(seconds, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.lines():
            terminalreporter.write_line(line)
        if self.path:
            table = {"tests": self.tests, "fixtures": self.fixtures}
            Path(self.path).write_text(json.dumps(table, indent=1))

    def lines(self) -> Iterable[str]:
        everything = [("test", name, 1, cost) for name, cost in self.tests.items()]
        everything += [("fixture", name, len(costs), sum(costs)) for name, costs in self.fixtures.items()]
        directories: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for kind, name, _, cost in everything:
            file = name.partition("::")[0]
            directory = "/".join(file.split("/")[:2]) if "/" in file else "tests"
            directories[directory][kind == "test"] += cost
        yield ""
        yield f"Processor seconds: {sum(cost for *_, cost in everything):.0f}, without collection"
        yield f"The {MOST_EXPENSIVE} most expensive tests and fixtures:"
        for kind, name, times, cost in sorted(everything, key=lambda row: -row[3])[:MOST_EXPENSIVE]:
            yield f"{cost:8.2f}  {kind} {name}" + (f" ({times} times)" if times > 1 else "")
        yield "Directories (processor seconds of fixtures, of tests):"
        for directory, (fixtures, tests) in sorted(directories.items(), key=lambda row: -sum(row[1])):
            yield f"{fixtures:8.1f} {tests:8.1f}  {directory}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", action="store_true", help="print the processor time of tests, fixtures and directories")
    parser.addoption("--costs-to", metavar="FILE", help="also write it as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if not (config.getoption("--costs") or config.getoption("--costs-to")):
        return
    config.pluginmanager.register(Meter())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Table(config.getoption("--costs-to")))
