"""Draws random sentences from all text in the repository: docstrings, comments, help, errors, logs and documents.

    python tools/draw_sentences.py [--count 80] [--seed 0]

A reviewer counts the sentences that a native-speaking engineer would read twice (CONTRIBUTING.md, "Language").
"""

import argparse
import ast
import io
import random
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_WORDS = 5  # shorter sentences reveal little about style
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")


def sentences(text: str) -> Iterator[str]:
    for sentence in _END.split(" ".join(text.split())):
        if len(sentence.split()) >= _WORDS and sentence[-1:] in ".!?":
            yield sentence


def of_python(file: Path) -> Iterator[str]:
    """Yield the sentences of docstrings, comments, and messages (string literals in calls)."""
    source = file.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from sentences(ast.get_docstring(node) or "")
        if isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield from sentences(argument.value)
    comment = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comment += " " + token.string.lstrip("# ")
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            yield from sentences(comment)
            comment = ""


def of_markdown(file: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", file.read_text(), flags=re.S)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*|#])", text):
        if not paragraph.lstrip().startswith(("|", "#", "<")):
            yield from sentences(paragraph.lstrip("-* "))


def of_toml(file: Path) -> Iterator[str]:
    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield from sentences(value)
        elif isinstance(value, dict):
            for inner in value.values():
                yield from texts(inner)

    yield from texts(tomllib.loads(file.read_text()))


def of_cpp(file: Path) -> Iterator[str]:
    comment = ""
    for line in file.read_text().splitlines():
        stripped = line.strip()
        if stripped.startswith("//"):
            comment += " " + stripped.lstrip("/ ")
        else:
            yield from sentences(comment)
            comment = ""


READERS = {".py": of_python, ".md": of_markdown, ".toml": of_toml, ".cpp": of_cpp, ".h": of_cpp}
FOLDERS = ("quire", "docs", "benchmarks", "tools", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)
    found = [
        (name, sentence)
        for name in listed.stdout.split()
        if Path(name).suffix in READERS and not name.startswith("benchmarks/results/")
        for sentence in READERS[Path(name).suffix](ROOT / name)
    ]
    print(f"{len(found)} sentences; seed {arguments.seed}")
    for number, (name, sentence) in enumerate(random.Random(arguments.seed).sample(found, arguments.count), 1):
        print(f"{number:3} {name}: {sentence}")


if __name__ == "__main__":
    main()
