"""tools/mutants.py on a package of three lines. cosmic-ray, which the tests do not need, makes no mutants here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "mutants.py"
SOURCE = """def first_above(limit):
    number = 1
    while number <= limit: number += 1
    return number
"""
TEST = """from quire_toy.search import first_above
def test_search(): assert first_above(2) == 3
"""
CHANGES = [  # before, after, outcome, first failing test
    ("<=", "<", "killed", "tests/test_search.py::test_search"),
    ("number = 1", "number = 2", "survived", ""),
    ("number += 1", "number += 0", "timeout", ""),
    ("def ", "deff ", "killed", "tests/test_search.py"),
    ("1\n    return number", "1\n    import os; os._exit(0)", "killed", ""),
]
# In a process of its own: the tool must be the first that imports quire.
PROGRAM = """
import json, sys
from pathlib import Path
from mutants import Runner

folder, changes = Path(sys.argv[1]), json.loads(sys.argv[2])
runner = Runner(folder / "work", folder / "code", folder / "tests", [])
assert runner.prepare("tests/test_*.py") == 30
path = runner.copy / "quire_toy/search.py"
source = path.read_text()
for before, after, outcome, _ in changes:
    mutated = source.replace(before, after)
    limit = 1 if outcome == "timeout" else 600
    print(json.dumps(runner.test_source(path, mutated, "tests/test_*.py", limit)[:2]))
    assert path.read_text() == source
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_mutant_is_killed_by_a_test_or_a_limit(tmp_path):
    files = {
        "code/quire_toy/search.py": SOURCE,
        "tests/tests/test_search.py": TEST,
        "tests/quire_toy/search.py": "the code comes from the other checkout",
        "tests/pyproject.toml": "[tool.pytest.ini_options]\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(CHANGES)]
    done = subprocess.run(command, env={"PYTHONPATH": str(TOOL.parent)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [tuple(json.loads(line)) for line in done.stdout.splitlines()] == [change[2:] for change in CHANGES]


def test_annotations_and_options_of_classes_are_not_mutated(tool):
    source = "class A(B, frozen=True):\n    x: int | None = 1 | 2\n    y: Annotated[int, Field(ge=0)] = 3\n"
    lines = source.splitlines()
    skipped = [lines[start[0] - 1][start[1] : end[1]] for start, end in tool._skipped(source)]
    assert skipped == ["True", "int | None"]


def test_a_mutant_counts_as_killed_if_any_of_the_selections_killed_it(tool):
    results = [("a", 0, "killed"), ("a", 1, "survived"), ("a", 2, "survived"), ("a", 3, "gone"), ("a", 1, "timeout")]
    mutants = [tool.Mutant(package, "file", 1, "Operator", number, "", out) for package, number, out in results]
    assert tool.table(mutants).splitlines()[2:] == ["| a | 3 | 2 | 1 | 1 | 67% |"]
