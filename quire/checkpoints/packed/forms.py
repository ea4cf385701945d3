"""Converts weights to plain data and a list of tensors, and back.

Panels(data, rows=64, columns=32, words=16)  <->  ["Panels", {"data": ["tensor", 0], "rows": 64, ...}], [data]
"""

from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from quire.ops.cpu.panels import Panels
from quire.ops.cpu.quantized_linear import QuantizedPanels
from quire.ops.reference.quantized import QuantizedMatrix

_FORMS: dict[str, Any] = {form.__name__: form for form in (Panels, QuantizedMatrix, QuantizedPanels)}
_TENSOR = "tensor"
_LIST = "list"
_VALUES = "values"


class FormError(ValueError):
    """A weight has an unknown form."""


def encode(value: Any) -> tuple[Any, list[Tensor]]:
    """Return (the value as plain data with tensors replaced by their indices, the list of tensors). A tensor that
    occurs several times in the value is listed once. Raises FormError."""
    places: dict[int, tuple[int, Tensor]] = {}

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, int):
            return value
        if isinstance(value, Tensor):
            place, _ = places.setdefault(id(value), (len(places), value))
            return [_TENSOR, place]
        if isinstance(value, list):
            return [_LIST, [plain(item) for item in value]]
        if isinstance(value, tuple):
            return [_VALUES, value]
        name = type(value).__name__
        if not is_dataclass(value) or _FORMS.get(name) is not type(value):
            raise FormError(f"weights of the form {name} are not kept")
        return [name, {field.name: plain(getattr(value, field.name)) for field in fields(value)}]

    data = plain(value)
    return data, [tensor for _, tensor in places.values()]


def decode(data: Any, tensors: list[Tensor]) -> Any:
    """Return the value that `encode` converted to the data. Raises FormError for invalid data."""
    if data is None or isinstance(data, int):
        return data
    try:
        kind, content = data
        if kind == _TENSOR:
            return tensors[content]
        if kind == _LIST:
            return [decode(item, tensors) for item in content]
        if kind == _VALUES:
            return tuple(content)
        return _FORMS[kind](**{name: decode(item, tensors) for name, item in content.items()})
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise FormError(f"the form of a weight cannot be read: {error!r}") from error
