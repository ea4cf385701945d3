"""How an option is declared, read and checked. The options themselves are in config.py."""

import json
import os
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import asdict, field, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from quire.messages.errors import error_text

T = TypeVar("T")
AtLeast0 = Annotated[int, msgspec.Meta(ge=0)]
AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]


class ConfigError(ValueError):
    """An option is unknown or out of range. The message names the option and the accepted values."""


def option(default: Any, **metadata: Any) -> Any:
    """Return a dataclass field for an option whose default is a list or a dict, or that needs special parsing.

    metadata: size=True accepts sizes such as 4G and 32k; json=True accepts a JSON object as text; empty=True accepts
    the flag without a value. flags lists additional flags, such as "-tp"; a flag with two dashes is another name of the
    option everywhere.
    """
    if isinstance(default, dict | list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def at_least(config: object, minimum: int, *names: str) -> None:
    """Raises ConfigError unless the options are None or integers of at least `minimum`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < minimum):
            raise ConfigError(f"{name} must be an integer of at least {minimum}, got {value!r}")


def check_seconds(name: str, value: Any, *, zero: bool = False, most: float = float("inf")) -> None:
    """Raises ConfigError unless the value is None or a number above 0, at most `most`. zero: allow 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and (0 < value <= most or (zero and value == 0))):
        bounds = ("at least 0" if zero else "above 0") + ("" if most == float("inf") else f" and at most {most:g}")
        raise ConfigError(f"{name} must be a number of seconds, {bounds}, got {value!r}")


def read_value(name: str, value: Any, hint: Any, metadata: Any) -> Any:
    """Return the option's value, read from text if the option is a size, a JSON object or a list.

    Raises ConfigError if it does not have the annotated type.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if get_origin(hint) is list:
        value = _read_list(name, value)
    elif isinstance(value, str) and metadata.get("size"):
        value = parse_size(value)
    elif metadata.get("json") and is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    elif isinstance(value, str) and metadata.get("json"):
        value = read_json(name, value)
        if not isinstance(value, dict):
            raise ConfigError(f"{name} must be a JSON object, got {value!r}")
    return converted(name, value, hint)


def _read_list(name: str, value: Any) -> Any:
    """Return a list of the given items. Text is one item, or a JSON list of items."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    if len(items) == 1 and isinstance(items[0], str) and items[0].startswith("["):
        return read_json(name, items[0])
    return items


def read_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {text!r} is not valid JSON: {error_text(error)}") from error


def read_object(option: str, given: Mapping[str, Any], kind: type[T]) -> T:
    """Build a dataclass from an option's JSON object. The class's __post_init__ checks constraints that types cannot
    express.

    Raises ConfigError, which names the option and the field.
    """
    hints = get_type_hints(kind, include_extras=True)
    for name in given:
        if name not in hints:
            raise ConfigError(f"{option} has no field {name!r}; it has {', '.join(hints)}")
    values = {name: converted(f"{option}: {name}", value, hints[name]) for name, value in given.items()}
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error_text(error)}") from None


def converted(name: str, value: Any, hint: Any) -> Any:
    """Return the value in the annotated type. The only conversion of numbers is from integers to floats. Raises
    ConfigError."""
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        accepted = _accepted(hint, has_type=", got" not in error_text(error))
        raise ConfigError(f"{name} must be {accepted}, got {value!r}") from None


def _accepted(hint: Any, has_type: bool) -> str:
    """Describe the values that an annotated type accepts. has_type: the rejected value has the type, but is out of
    range."""
    names = []
    for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if get_origin(kind) is Literal:
            return f"one of {', '.join(map(repr, get_args(kind)))}"
        if get_origin(kind) is Annotated:
            kind, limits = get_args(kind)
            if has_type:
                return f"at least {limits.ge}" if limits.le is None else f"a number from {limits.ge} to {limits.le}"
        names.append("None" if kind is NoneType else str(kind) if get_args(kind) else kind.__name__)
    return f"of type {' or '.join(names)}".replace("typing.", "")


def parse_size(text: str) -> int:
    """Reads '4G', '512M', '2k' or plain digits. Upper case K, M, G and T are powers of 1024, lower case of 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text.strip())
    if not match:
        raise ConfigError(f"{text!r} is no size; write a number such as 4096, 2k or 4G")
    number, unit = match.groups()
    power = "kmgt".find(unit.lower()) + 1 if unit else 0
    return int(float(number) * (1024 if unit.isupper() else 1000) ** power)


def imported(name: str, path: str) -> Any:
    """Return the object that the option `name` refers to by its import path, package.module.NAME or
    package.module:NAME.

    Raises ConfigError if it cannot be imported.
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{name} {path!r} cannot be imported: {error_text(error)}") from error
