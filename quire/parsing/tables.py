"""Reads the tables of formats."""

import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

Format = TypeVar("Format")


def formats(module: str, kind: type[Format], functions: Iterable[Callable[..., Any]]) -> dict[str, Format]:
    """Read the formats in the TOML file next to a module, by their names. functions: the functions that the file names.

    A table has one or several names; a string instead of a table is an alias of the format.
    """
    by_name = {function.__name__: function for function in functions}
    found: dict[str, Format] = {}
    tables = tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8"))
    others = {name: tables.pop(name) for name, table in list(tables.items()) if isinstance(table, str)}
    for names, table in tables.items():
        fields = {
            field: by_name[value] if field in ("body", "whole", "filter") else _frozen(value)
            for field, value in table.items()
        }
        found |= dict.fromkeys(names.split(), kind(**fields))
    return found | {other: found[name] for other, name in others.items()}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
