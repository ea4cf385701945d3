"""Which features the engines of tests really had enabled together: `pytest --record-features` adds it to a file.

An engine has a feature if its options, its model, one of its requests or one of its outputs has it. So a pair of
features is recorded for a test if one engine had both while the test ran. Engines in processes of their own are seen
by what they are asked and what they return. Servers that a test starts as commands write what they see to files, which
are read after each test.

Nothing is watched without the option.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from quire.engine.llm import LLM
from support.watched_commands import FOLDER_VARIABLE
from support.watched_features import FEATURES, Watcher, before

TESTS = Path(__file__).parents[1]
RECORD = TESTS / "data" / "combinations.json"
MOST_FILES = 3  # of a pair; more would be hard to read
Combinations = dict[str, dict[str, list[str]]]  # by the first and the second feature of a pair: test files


class Recorder:
    """In each process that runs tests. Reports carry what it saw to the process that prints."""

    def __init__(self, folder: Path) -> None:
        """folder: where the servers that tests start as commands write what their engines have."""
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes of the files in this folder
        self.seen: dict[tuple[str, int], set[str]] = defaultdict(set)  # by process and engine, in the test that runs
        self._watcher = Watcher(self._saw)
        before(LLM, "beam_search", self._beams)

    def _saw(self, engine: int, features: Iterable[str], process: str = "") -> None:
        self.seen[process, engine].update(features)

    def _beams(self, llm: LLM, *_: Any) -> None:
        if (engine := self._watcher.by_processor.get(llm.processor)) is not None:
            engine.has("beam search")

    def _read_commands(self) -> None:
        for file in self._folder.iterdir():
            with file.open("rb") as lines:
                lines.seek(self._read.get(file, 0))
                for line in lines:
                    self._saw(*json.loads(line), process=file.name)
                self._read[file] = lines.tell()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "call":
            self._read_commands()
            report.user_properties.append(("features", [sorted(features) for features in self.seen.values()]))
            self.seen.clear()
        return report


class Record:
    """In the process that prints: merges what passed tests combined into the file."""

    def __init__(self) -> None:
        self.found: dict[str, set[tuple[str, str]]] = defaultdict(set)  # pairs, by test file
        self.ran: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            file = report.nodeid.partition("::")[0]
            for name, value in report.user_properties:
                if name == "features":
                    for features in value:
                        self.found[file].update(combinations(sorted(features, key=FEATURES.index), 2))

    def pytest_sessionfinish(self) -> None:
        write(merged(read(), self.found))


def read() -> Combinations:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}  # type: ignore[no-any-return]


def merged(old: Combinations, found: dict[str, set[tuple[str, str]]]) -> Combinations:
    """The old pairs whose files and features are still there, and the new ones, each with few files."""
    files: dict[tuple[str, str], set[str]] = defaultdict(set)
    for first, others in old.items():
        for second, names in others.items():
            if {first, second} <= set(FEATURES):
                files[first, second] |= {name for name in names if (TESTS.parent / name).exists()}
    for file, pairs in found.items():
        for pair in pairs:
            files[pair].add(file)
    result: Combinations = {}
    for first, second in sorted(files, key=lambda pair: (FEATURES.index(pair[0]), FEATURES.index(pair[1]))):
        if names := sorted(files[first, second])[:MOST_FILES]:
            result.setdefault(first, {})[second] = names
    return result


def write(combinations_: Combinations) -> None:
    RECORD.write_text(json.dumps(combinations_, indent=1) + "\n", encoding="utf-8")


def register(config: pytest.Config) -> None:
    folder = tempfile.TemporaryDirectory(prefix="quire-features-")
    config.add_cleanup(folder.cleanup)
    os.environ[FOLDER_VARIABLE] = folder.name  # of the commands that tests start
    config.pluginmanager.register(Recorder(Path(folder.name)))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record())
