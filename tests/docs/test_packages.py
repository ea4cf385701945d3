"""The packages: what docs/architecture.md says of them, and how their files import each other."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in (ROOT / "quire").rglob("*.py")
}


def imports(module: str) -> Iterator[str]:
    """The modules of quire that a module imports, anywhere but for types alone."""
    waiting: list[ast.AST] = [ast.parse(FILES[module].read_bytes())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        if isinstance(node, ast.ImportFrom) and node.module in FILES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else node.module


def test_no_two_files_import_each_other():
    """Not even in several steps. `quire` itself is left out: it imports what a program asks it for."""
    graph = {module: set(imports(module)) - {module, "quire"} for module in FILES if module != "quire"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_modules_whose_names_are_known_are_imported_by_statements():
    """Names that come from options or tables are not known when the code is written."""
    named = re.compile(r"import_module\(\s*\"quire\.[\w.]+\"\s*\)")
    assert [module for module, file in FILES.items() if named.search(file.read_text())] == []


def test_the_page_has_a_line_for_each_package():
    packages = {module.split(".")[1] for module in FILES if module.count(".") > 1}
    assert {package for package in packages if f"{package}/" not in PAGE.split("## Packages")[1]} == set()


def test_files_that_the_page_names_exist():
    section = PAGE.split("Where to look:")[1].split("### The server")[0]
    paths = re.findall(r"`([\w/]+(?:\.\w+|/))`", section)
    assert len(paths) > 12
    assert [path for path in paths if not (ROOT / "quire" / path).exists()] == []


def test_the_readme_and_the_page_count_the_same_lines_of_code():
    """The table is written by tools/code_lines.py, and may lag behind the code."""
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "code_lines.py"], capture_output=True, text=True, check=True
    )
    counts = [
        int(re.search(pattern, text)[1].replace(",", ""))  # type: ignore[index]
        for pattern, text in (
            (r"about ([\d,]+) lines of Python", (ROOT / "README.md").read_text()),
            (r"\| in total \| ([\d,]+) \|", PAGE),
            (r"\| in total \| ([\d,]+) \|", made.stdout),
        )
    ]
    assert counts == pytest.approx([counts[-1]] * 3, rel=0.02)
