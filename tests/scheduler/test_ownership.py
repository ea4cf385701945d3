"""Each field of a request is written by one part of the scheduler. Found in the source, by the names of the fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.kv.manager import RequestBlocks
from quire.scheduler.request import ConstrainedOutput, Drafts, NextCompression, Request

ROOT = Path(quire.__file__).parent
PLACES = ["scheduler", "kv", "structured", "speculation", "lora", "transfer", "engine/core.py"]

OWNERS = {
    "scheduler/scheduler.py": {
        "holds",
        "is_limited",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight_samples",
        "num_preemptions",
        "num_retired_tokens",
        "repetition",
        "row",
        "status",
        "token_ids",
    },
    "kv/manager.py": {"block_hashes", *RequestBlocks.__slots__},
    "scheduler/constraints.py": {"constrained", *ConstrainedOutput.__slots__},
    "scheduler/compression.py": {"compression", *NextCompression.__slots__},
    "scheduler/speculation.py": {"drafts", *Drafts.__slots__},
    # Set once, or changed by a method of Request.
    "scheduler/request.py": {
        "blocks",
        "cache_salt",
        "extra_keys",
        "key",
        "max_total_tokens",
        "min_total_tokens",
        "num_prompt_tokens",
        "request_id",
        "source",
        "stop_token_ids",
    },
}
CHANGING = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}  # methods of lists
# Names of variables and attributes that are requests, or parts of them. Messages have fields of the same names.
REQUESTS = {"request", "holder", "each", "other", "text", "blocks", "drafts", "compression", "constrained"}


def writes(tree: ast.AST) -> Iterator[tuple[str, ast.Attribute]]:
    """What is assigned, deleted or changed by a method of lists: the name of the field, and where."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            targets = [node.func.value]
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple | ast.List):
                targets += target.elts
            elif isinstance(target, ast.Starred | ast.Subscript):
                targets.append(target.value)
            elif isinstance(target, ast.Attribute):
                yield target.attr, target


def owner(tree: ast.Attribute) -> str:
    """The variable or the attribute whose field it is."""
    value = tree.value
    return value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""


def foreign_writes(path: str, source: str) -> list[str]:
    """The fields of requests that this file writes and does not own."""
    owners = {field: file for file, fields in OWNERS.items() for field in fields}
    return [
        f"{path}:{place.lineno} writes {field}, which {owners[field]} owns"
        for field, place in writes(ast.parse(source))
        if owners.get(field, path) != path and owner(place) in REQUESTS
    ]


def test_every_field_has_an_owner() -> None:
    fields = set().union(*OWNERS.values())
    parts = (RequestBlocks, ConstrainedOutput, NextCompression, Drafts)
    assert set(Request.__slots__) <= fields
    assert fields == set(Request.__slots__).union(*(part.__slots__ for part in parts))


@pytest.mark.parametrize("place", PLACES)
def test_a_field_is_written_by_its_owner_alone(place: str) -> None:
    found = []
    for path in sorted((ROOT / place).rglob("*.py")) or [ROOT / place]:
        found += foreign_writes(path.relative_to(ROOT).as_posix(), path.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("scheduler.py", "request.num_computed_tokens = 3"),
        ("scheduler.py", "request.row, request.holds = 1, 2"),
        ("scheduler.py", "request.num_retired_tokens += count"),
        ("scheduler.py", "request.token_ids.append(3)"),
        ("manager.py", "del request.blocks.tables[0][1:]"),
        ("manager.py", "request.blocks.tables[0][1] = block"),
        ("compression.py", "request.compression.at = 7"),
        ("speculation.py", "request.drafts = NO_DRAFTS"),
    ],
)
def test_a_write_elsewhere_is_found(file: str, line: str) -> None:
    assert foreign_writes("scheduler/queue.py", line)
    assert not any(foreign_writes(path, line) for path in OWNERS if path.rpartition("/")[2] == file)
