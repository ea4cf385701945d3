"""Helpers of the format readers: check the settings in a checkpoint's quantization_config."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire.checkpoints.formats.scheme import Scheme

Settings = Mapping[str, Any]
SchemeOf = Callable[[str], Scheme | None]  # by the name of a layer


def check_field(settings: Settings, field: str, accepted: Iterable[Any], default: Any = None) -> Any:
    """Return the field's value. Raises ValueError if it is not one of the accepted values."""
    value = settings.get(field, default)
    accepted = tuple(accepted)
    if value not in accepted:
        listed = ", ".join(map(repr, accepted))
        raise ValueError(f"quantization_config has {field}={value!r}, which is not supported; supported: {listed}")
    return value


def group_size_of(settings: Settings, field: str = "group_size") -> int:
    """Return the number of inputs that share a scale, -1 for all. Raises ValueError for any other value."""
    value = settings.get(field, -1)
    if not isinstance(value, int) or value < -1:
        raise ValueError(f"quantization_config has {field}={value!r}, which is no number of inputs")
    return value
