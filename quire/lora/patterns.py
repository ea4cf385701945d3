"""Matches the patterns of an adapter's config with modules. PEFT allows regular expressions.

Plain names are compared directly. Regular expressions are matched in a worker process, where they can be stopped.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from quire.messages.errors import error_text
from quire.platform.untrusted.limits import MIB, LimitExceededError, Limits
from quire.platform.untrusted.pool import shared_pool

_MOST_PATTERNS, _LONGEST = 10_000, 1_000  # characters
_LIMITS = Limits(cpu_seconds=2.0, memory_bytes=256 * MIB, total_seconds=20.0)
# Characters of a plain name. A dot matches only itself, although it means "any character" in a regular expression. This
# matters only for a module whose name has another character at the position of a dot.
_NAME = re.compile(r"[\w.-]+", re.ASCII)


def values_by_module(field: str, patterns: Any, modules: Sequence[str]) -> dict[str, Any]:
    """Return by module the value of the first pattern that matches the end of the module's name, like PEFT. Modules
    without a match are left out.

    field: a field of adapter_config.json. Raises ValueError with the field's name.
    """
    if not isinstance(patterns, Mapping):
        raise ValueError(f"{field} must be an object, not of type {type(patterns).__name__}")
    if len(patterns) > _MOST_PATTERNS:
        raise ValueError(f"{field} has {len(patterns):,} patterns; at most {_MOST_PATTERNS:,} are allowed")
    keys = list(patterns)
    if too_long := next((key for key in keys if len(key) > _LONGEST), None):
        raise ValueError(f"{field} has a pattern of {len(too_long):,} characters; at most {_LONGEST:,} are allowed")
    first = dict[str, int]()  # index of the first pattern by module
    names = {key: index for index, key in enumerate(keys) if _NAME.fullmatch(key)}
    for module in modules if names else ():
        parts = module.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        if found := [names[end] for end in ends if end in names]:
            first[module] = min(found)
    expressions = {index: key for index, key in enumerate(keys) if key not in names}
    for module, index in _matches(field, expressions, modules).items():
        first[module] = min(index, first.get(module, index))
    return {module: patterns[keys[index]] for module, index in first.items()}


def _matches(field: str, expressions: Mapping[int, str], modules: Sequence[str]) -> dict[str, int]:
    """Return by module the index of the first matching regular expression. Raises ValueError with the field's name."""
    if not expressions:
        return {}
    try:
        found = shared_pool().run(
            "quire.lora.patterns:first_matches", list(expressions.values()), list(modules), limits=_LIMITS
        )
    except LimitExceededError as error:
        raise ValueError(f"{field} takes too long to match: {error_text(error)}") from error
    except ValueError as error:
        raise ValueError(f"{field} has {error_text(error)}") from error
    indices = list(expressions)
    return {module: indices[at] for module, at in zip(modules, found, strict=True) if at is not None}


def first_matches(patterns: Sequence[str], modules: Sequence[str]) -> list[int | None]:
    """Return by module the index of the first matching pattern. Runs in a worker process. Raises ValueError."""
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(rf"(.*\.)?({pattern})$"))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{pattern[:100]!r}, which is no regular expression: {error_text(error)}") from error
    return [next((i for i, each in enumerate(compiled) if each.match(module)), None) for module in modules]
