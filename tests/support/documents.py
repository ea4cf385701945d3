"""The documents of the repository: their blocks of code, their links and the commands in them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]
GUIDES = [path for path in DOCUMENTS if path.parent != ROOT / "benchmarks" / "results"]  # whose commands are tested
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>\w*) *\n(?P<text>.*?)^(?P=indent)(?P=fence) *$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A block of code. line: of the document, at which its text begins."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.path)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line of a shell: a program with arguments. text: as it is written, with its variables."""

    block: Block
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    def __str__(self) -> str:
        return f"{self.block}: {self.text}"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [
        Block(path, text.count("\n", 0, found.start("text")) + 1, found["language"], found["text"])
        for found in _FENCE.finditer(text)
    ]


def commands(path: Path) -> list[Command]:
    """The commands of the blocks that a shell runs, in their order. `a && b` are two."""
    return [command for block in blocks(path) if block.language == "bash" for command in _commands(block)]


def _commands(block: Block) -> Iterator[Command]:
    lines = block.text.replace("\\\n", " ").splitlines()
    while lines:
        line = lines.pop(0)
        while (parts := _parts(line)) is None:
            line += "\n" + lines.pop(0)
        yield from (Command(block, part) for part in parts)


def _parts(line: str) -> list[str] | None:
    """The commands of a line, without its comment. None if a text in quotes goes on in the next line."""
    words = shlex.shlex(line, posix=False, punctuation_chars=True)
    words.whitespace_split = True
    parts: list[list[str]] = [[]]
    try:
        for word in words:
            if word == "&&":
                parts.append([])
            else:
                parts[-1].append(word)
    except ValueError:
        return None
    return [" ".join(part) for part in parts if part]


def prose(path: Path) -> str:
    """The text of a document without its code."""
    return re.sub(r"``[^`]+``|`[^`\n]+(?:\n[^`\n]+)?`", "", _FENCE.sub("", path.read_text(encoding="utf-8")))


def links(path: Path) -> list[str]:
    """The targets of links and pictures, and of definitions such as [name]: target."""
    text = prose(path)
    found = re.findall(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)", text)
    return found + re.findall(r"^\[[^\]]+\]: *(\S+)", text, re.M) + re.findall(r"<(https?://[^>]+)>", text)


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub and the site make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", _FENCE.sub("", path.read_text(encoding="utf-8")), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        number, name = 0, slug
        while name in found:
            number += 1
            name = f"{slug}-{number}"
        found.add(name)
    return found


def write_files(folder: Path) -> None:
    """The files that commands of the documents name."""
    for name in ("secret", "cluster-secret", "FILE"):
        path = folder / name
        path.write_text("0123456789abcdef" * 4)
        path.chmod(0o600)
    (folder / "quire.yaml").write_text("max-model-len: 512\n")
    (folder / "requests.jsonl").write_text(
        json.dumps(
            {
                "custom_id": "a",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": "Once upon a time", "max_tokens": 9},
            }
        )
        + "\n"
    )
    (folder / "trace.jsonl").write_text('{"arrival": 0, "input_length": 200, "output_length": 20}\n')
