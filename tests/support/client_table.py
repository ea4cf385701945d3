"""The table of clients in docs/apis.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "apis.md"
_CHECKS = {
    "chat": "chats",
    "greeting": "chats",
    "generate": "chats",
    "completion": "completions",
    "tools": "tools",
    "result": "tools",
    "structured": "structured output",
    "models": "models",
    "unknown model": "errors",
    "long prompt": "errors",
    "chat usage": "usage",
    "generate usage": "usage",
    "completion usage": "usage",
}


@dataclass(frozen=True)
class Row:
    """packages: the version of each that was tried. script: in tests/clients. checks: what the script checks."""

    packages: dict[str, str]
    script: str
    checks: frozenset[str]


def client_rows() -> list[Row]:
    _, _, section = DOCUMENT.read_text().partition("\n## Clients\n")
    section = section.partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [
        Row(dict(re.findall(r"`([^`]+)` ([\d.]+)", packages)), script.strip("`"), frozenset(checks.split(", ")))
        for packages, _, checks, script in lines
    ]


def checks_of(names: set[str]) -> set[str]:
    """What is checked by answers with these names, such as "chat/async stream"."""
    checks = {_CHECKS[name.partition("/")[0]] for name in names if name != "keys that are not null"}
    return checks | ({"streams"} if any("stream" in name for name in names) else set())
