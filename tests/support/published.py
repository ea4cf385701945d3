"""Configs and tensor names of published checkpoints, from public metadata, in tests/data/published_models.json.

The names are kept in a short form: numbers are replaced by {}, and their ranges are listed beside.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "data" / "published_models.json"


def published() -> dict[str, dict[str, Any]]:
    """By name: `source`, the public repository and the commit; `config`, its config.json; `tensors`, in short form."""
    models: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return models


def short_form(names: list[str]) -> dict[str, list[list[int]]]:
    """Pattern -> for each number in it, the first and the last value. Raises ValueError for names that are not all
    combinations of such ranges."""
    numbers: dict[str, set[tuple[int, ...]]] = {}
    for name in names:
        found = tuple(int(number) for number in re.findall(r"(?<=\.)\d+(?=\.)", name))
        numbers.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "{}", name), set()).add(found)
    made = {
        pattern: [[min(column), max(column)] for column in zip(*values, strict=True)]
        for pattern, values in numbers.items()
    }
    if sorted(full_names(made)) != sorted(names):
        raise ValueError("the numbers in the names are not all combinations of ranges")
    return made


def full_names(tensors: dict[str, list[list[int]]]) -> list[str]:
    ranges = {pattern: [range(first, last + 1) for first, last in both] for pattern, both in tensors.items()}
    return [pattern.format(*numbers) for pattern, columns in ranges.items() for numbers in itertools.product(*columns)]
