"""Counts the lines of code of each package, without blank lines, comments and docstrings.

    python tools/code_lines.py [--write]

With --write, it updates the table in docs/architecture.md.
"""

import argparse
import ast
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- code lines -->"
END = "<!-- end of code lines -->"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(file: Path) -> int:
    """Count the lines of a Python or C++ file that contain code."""
    if file.suffix != ".py":
        lines = [line.strip() for line in file.read_text().splitlines()]
        return sum(1 for line in lines if line and not line.startswith("//"))
    tree = ast.parse(file.read_bytes())
    documentation = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            documentation.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    with file.open("rb") as source:
        tokens = [token for token in tokenize.tokenize(source.readline) if token.type not in _NO_CODE]
    lines_of_code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines_of_code - documentation - {0})


def table() -> str:
    """Return the table: lines of Python and of C++ by package, the largest package first."""
    python = Counter[str]()
    cpp = Counter[str]()
    for file in sorted((ROOT / "quire").rglob("*")):
        package = file.relative_to(ROOT / "quire").parts[0]
        if file.suffix == ".py":
            python[package] += code_lines(file)
        elif file.suffix in (".cpp", ".h"):
            cpp[package] += code_lines(file)
    rows = [f"| {package} | {count:,} | {cpp[package]:,} |" for package, count in python.most_common()]
    total = f"| in total | {python.total():,} | {cpp.total():,} |"
    return "\n".join(["| package | Python | C++ |", "|---|---|---|", *rows, total])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update docs/architecture.md")
    made = table()
    if not parser.parse_args().write:
        print(made)
        return
    before, rest = PAGE.read_text().split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")


if __name__ == "__main__":
    main()
