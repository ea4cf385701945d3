"""An error message is never empty."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.messages.errors import error_text

SOURCES = sorted(Path(quire.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("n must be positive"), "n must be positive"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (KeyError("n"), "KeyError: 'n'"),
        (AssertionError(), "AssertionError"),
        (MemoryError(), "MemoryError"),
        (TimeoutError(), "TimeoutError"),
        (ValueError(" \n"), "ValueError"),
    ],
    ids=repr,
)
def test_an_exception_without_a_text_is_called_by_its_type(error, text):
    assert error_text(error) == text


def exceptions_as_text(tree: ast.AST) -> Iterator[int]:
    """Lines that make a text of a caught exception, or of an argument that is one, without error_text."""
    for scope in ast.walk(tree):
        names = set()
        if isinstance(scope, ast.ExceptHandler) and scope.name:
            names = {scope.name}
        elif isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            kinds = {"Exception", "BaseException"}
            names = {a.arg for a in scope.args.args if a.annotation is not None and ast.unparse(a.annotation) in kinds}
        for node in ast.walk(scope) if names else ():
            texts: list[ast.expr] = []
            if isinstance(node, ast.FormattedValue) and node.conversion != ord("r"):
                texts = [node.value]
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                texts = node.args if called == "str" or called.startswith(("print", "logger.")) else []
            yield from (t.lineno for t in texts if isinstance(t, ast.Name) and t.id in names)


@pytest.mark.parametrize("line", ['f"{error}"', "str(error)", 'logger.error("%s", error)', "print(error)"])
def test_the_search_below_finds_what_it_looks_for(line):
    handler = f"try:\n    pass\nexcept ValueError as error:\n    {line}"
    function = f"def answer(error: Exception):\n    {line}"
    assert list(exceptions_as_text(ast.parse(handler))) == [4]
    assert list(exceptions_as_text(ast.parse(function))) == [2]
    assert not list(
        exceptions_as_text(ast.parse(handler.replace("error)", "error_text(error))").replace("{error}", "x")))
    )


def test_exceptions_become_text_in_one_way_only():
    """By quire.messages.errors.error_text. compiling.py is a program without imports of quire."""
    exempt = ("messages/errors.py", "ops/cpu/compiling.py")
    others = [path for path in SOURCES if not path.as_posix().endswith(exempt)]
    assert len(others) > 100
    found = {str(path): sorted(set(exceptions_as_text(ast.parse(path.read_text())))) for path in others}
    assert {path: lines for path, lines in found.items() if lines} == {}
