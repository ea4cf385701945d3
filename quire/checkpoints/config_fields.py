"""The typed view of a checkpoint's config.json: a field of the wrong type raises an error at start that names it.

The architectures read the fields afterwards, and need no checks of their own.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from quire.config.engine import ConfigError
from quire.messages.errors import error_text

Config = Mapping[str, Any]
Made = TypeVar("Made")

_MOST = 1 << 40  # of a size: larger than in any model, small enough that products of sizes do not overflow
_MOST_LAYERS = 10_000
_LONGEST = 1_000  # characters of a text
_DEEPEST = 8  # objects within objects
_SHOWN = 60  # characters of a wrong value


def _is_integer(value: Any, least: int, most: int = _MOST) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any) -> bool:  # NaN compares as false
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(of(item) for item in value)


# By group in config_fields.toml: a check of a value, and a description of valid values.
_GROUPS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "sizes": (lambda value: _is_integer(value, 1), "a positive integer"),
    "counts": (lambda value: _is_integer(value, 0), "an integer of at least 0"),
    "layers": (lambda value: _is_integer(value, 1, _MOST_LAYERS), f"an integer from 1 to {_MOST_LAYERS:,}"),
    "integers": (lambda value: _is_integer(value, -_MOST), "an integer"),
    "numbers": (_is_number, "a finite number"),
    "flags": (lambda value: isinstance(value, bool) or value in (0, 1), "true or false"),
    "texts": (_is_text, f"a string of at most {_LONGEST:,} characters"),
    "names": (lambda value: _is_list(value, _is_text), "a list of strings"),
    "lists": (lambda value: _is_list(value, lambda item: _is_integer(item, -_MOST)), "a list of integers"),
    "vectors": (lambda value: _is_list(value, lambda i: _is_number(i) or isinstance(i, bool)), "a list of numbers"),
    "sizes_or_auto": (lambda value: value == "auto" or _is_integer(value, 1), "a positive integer or 'auto'"),
    "sizes_or_lists": (
        lambda value: _is_integer(value, 0) or _is_list(value, lambda item: _is_integer(item, 0)),
        "an integer of at least 0 or a list of these",
    ),
    "numbers_or_lists": (
        lambda value: _is_number(value) or _is_list(value, _is_number),
        "a finite number or a list of these",
    ),
    "objects": (lambda value: isinstance(value, Mapping), "an object"),
}
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_RULES = {name: (group, *_GROUPS[group]) for group, names in _TABLE.items() for name in names.split()}
FIELDS = frozenset(_RULES)  # the fields whose types are checked


def checked(config: Config, where: str = "config.json", depth: int = 0) -> dict[str, Any]:
    """Return the config, with numbers such as 4096.0 converted to integers. Raises ConfigError, which names the field,
    for a wrong type or an impossible value."""
    if depth > _DEEPEST:
        raise ConfigError(f"{where} lies too deep, in more than {_DEEPEST} objects")
    fields = dict(config)
    if config.get("head_dim") == 0 and config.get("qk_rope_head_dim") == 0:  # transformers saves the rotated elements
        del fields["head_dim"]
    for name, value in list(fields.items()):
        rule = _RULES.get(name)
        if rule is None or value is None:
            continue
        group, is_right, expected = rule
        if isinstance(value, float) and value.is_integer() and group in ("sizes", "counts", "layers"):
            fields[name] = value = int(value)
        if not is_right(value):
            raise ConfigError(f"{where}: {name} must be {expected}, got {_shown(value)}")
        if group == "objects":
            fields[name] = checked(value, f"{where}: {name}", depth + 1)
    return fields


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits, or lists in lists
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read(config: Config, name: str, make: Callable[[Config], Made]) -> Made:
    """Return the result of `make` for a checked config. An error that names no field is replaced by one that names the
    faulty field. name: of the architecture."""
    fault: Exception
    try:
        return make(config)
    except (AssertionError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, MemoryError) as e:
        fault = e
    except ValueError as e:  # most name a field, but not Python's own, such as that of zip(strict=True)
        if type(e) is not ValueError or any(field in error_text(e) for field in _fields(config)):
            raise
        fault = e
    lacking = fault.args[0] if isinstance(fault, KeyError) and fault.args and fault.args[0] not in config else None
    if lacking in _RULES:
        raise ConfigError(f"config.json of a {name} lacks {lacking!r}") from fault
    if (path := _cure(config, make)) is not None:
        value: Any = config
        for key in path:
            value = value[key]
        message = f"{': '.join(path)} cannot be {_shown(value)}"
        raise ConfigError(f"config.json of a {name}: {message} ({error_text(fault)})") from fault
    if lacking is not None:
        raise ConfigError(f"config.json of a {name} lacks {lacking!r}") from fault
    fields = ", ".join(list(_fields(config))[:40])
    raise ConfigError(f"config.json of a {name}: {fields} do not fit together ({error_text(fault)})") from fault


def _fields(config: Config) -> Iterator[str]:
    for name, value in config.items():
        yield name
        if isinstance(value, Mapping):
            yield from map(str, value)


def _without_a_field(config: Config) -> Iterator[tuple[tuple[str, ...], Config]]:
    """Yield the config without one field, for each field. Null fields come first, as the likeliest causes."""
    for name in sorted(config, key=lambda name: config[name] is not None):
        value = config[name]
        if isinstance(value, Mapping):
            for inner in value:
                yield (name, str(inner)), {**config, name: {k: v for k, v in value.items() if k != inner}}
        yield (name,), {key: v for key, v in config.items() if key != name}


def _cure(config: Config, make: Callable[[Config], Any]) -> tuple[str, ...] | None:
    """Return the field without which the config can be read; else the required field that was looked up before the
    error."""
    needed: tuple[str, ...] | None = None
    for path, without in _without_a_field(config):
        try:
            make(without)
        except KeyError as error:
            if error.args[:1] == path[-1:]:
                needed = needed or path
        except Exception:
            continue
        else:
            return path
    return needed
