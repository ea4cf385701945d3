"""docs/features.md: which features exclude each other, and which tests ran two of the others together.

The first table is that of quire/config/conflicts.py. The second one is what `pytest --record-features` has seen, see
tests/support/combinations.py.
"""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from quire.config.conflicts import CONFLICTS, Conflict
from quire.config.features import Kind
from support.combinations import FEATURES, Combinations, merged, read
from support.server_process import Server
from support.watched_commands import FOLDER_VARIABLE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "features.md"
SECTION = re.compile(r"(<!-- (\w+): written by .*? -->\n)(.*?)(<!-- end of \2 -->\n)", re.DOTALL)
# These have a column, too.
COLUMNS = [
    "chunked prefill",
    "prefix caching",
    "preemption",
    "sliding window",
    "priority",
    "seeded sampling",
    "stop strings",
    "n > 1",
    "two steps in flight",
]
ROWS = [*COLUMNS, *(feature for feature in FEATURES if feature not in COLUMNS)]


def conflicts() -> str:
    lines = ["| feature | cannot be combined with | because |", "|---|---|---|"]
    lines += [f"| {conflict.a.name} | {other(conflict)} | {conflict.reason} |" for conflict in CONFLICTS]
    return "\n".join(lines) + "\n"


def other(conflict: Conflict) -> str:
    """The second feature, as a phrase of its own."""
    phrases = {Kind.MISSING: "leaving {} out", Kind.MODEL: "a model that has {}", Kind.PLACE: "running {}"}
    return phrases.get(conflict.b.kind, "{}").format(conflict.b.name)


def combined(record: Combinations) -> str:
    """The test files, and the table whose numbers stand for them."""
    files = sorted({name for others in record.values() for names in others.values() for name in names})
    number = {name: str(index) for index, name in enumerate(files, 1)}
    lines = [f"{number[name]}. `{name}`" for name in files]
    lines += ["", f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for index, feature in enumerate(ROWS[1:], 1):
        cells = [" ".join(map(number.__getitem__, ran(record, feature, column))) for column in COLUMNS[:index]]
        cells += [""] * (len(COLUMNS) - len(cells))
        lines.append(f"| **{feature}** | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def ran(record: Combinations, one: str, two: str) -> list[str]:
    return record.get(one, {}).get(two) or record.get(two, {}).get(one) or []


def test_the_page_shows_both_tables(pytestconfig: pytest.Config):
    text = PAGE.read_text(encoding="utf-8")
    written = {"conflicts": conflicts(), "tests": combined(read())}
    assert {match[2] for match in SECTION.finditer(text)} == set(written)
    expected = SECTION.sub(lambda match: f"{match[1]}\n{written[match[2]]}\n{match[4]}", text)
    if pytestconfig.getoption("write"):
        PAGE.write_text(expected, encoding="utf-8")
    assert pytestconfig.getoption("write") or text == expected, f"run `pytest -n0 {Path(__file__).name} --write`"


def test_a_test_has_combined_each_feature_with_another():
    missing = {one for one in FEATURES if not any(ran(read(), one, two) for two in FEATURES)}
    assert not missing, (
        "Run the tests of these features with `pytest --record-features`, and write the page: "
        f"`pytest -n0 {Path(__file__).name} --write`."
    )


def test_files_and_features_of_the_record_exist():
    assert merged(read(), {}) == read()


def test_a_record_keeps_few_files_of_a_pair():
    pairs = set(combinations(["chunked prefill", "preemption", "priority"], 2))
    names = ["tests/conftest.py", "tests/docs/test_links.py", "tests/quick.txt", "tests/gpu"]
    found = merged({}, dict.fromkeys(names, pairs))
    assert found["chunked prefill"] == {"preemption": sorted(names)[:3], "priority": sorted(names)[:3]}
    assert merged(found, {"tests/bench": {("preemption", "priority")}})["preemption"]["priority"][0] == "tests/bench"
    assert merged({"chunked prefill": {"priority": ["tests/gone.py"], "levitation": ["tests/gpu"]}}, {}) == {}


@pytest.mark.slow
def test_servers_that_tests_start_as_commands_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with Server("--data-parallel-size", "2", "--max-num-batched-tokens", "32", "--max-num-seqs", "4") as server:
        server.client.complete("Once upon a time", max_tokens=2, temperature=1, seed=1)
        server.client.complete("Once upon a time " * 20, max_tokens=2)
    (file,) = tmp_path.iterdir()
    first, *_, last = [json.loads(line) for line in file.read_text().splitlines()]
    assert first == [0, ["data parallelism", "seeded sampling"]]
    assert last == [0, ["chunked prefill", "data parallelism"]]
