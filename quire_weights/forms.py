"""Weights as plain data and a list of tensors, and back.

Panels(data, rows=64, columns=32, words=16)  <->  ["Panels", {"data": ["tensor", 0], "rows": 64, ...}], [data]
"""

from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from quire.ops.cpu.panels import Panels
from quire.ops.cpu.quantized_linear import QuantizedPanels
from quire.ops.reference.quantized import QuantizedMatrix

_FORMS: dict[str, Any] = {form.__name__: form for form in (Panels, QuantizedMatrix, QuantizedPanels)}
_TENSOR, _LIST = "tensor", "list"


class FormError(ValueError):
    """A weight has a form that is unknown here."""


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """The value as plain data, in which a tensor is its place in `tensors`. New ones are added there; a tensor that is
    in several values has one place. Raises FormError."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, Tensor):
        place = next((i for i, tensor in enumerate(tensors) if tensor is value), len(tensors))
        if place == len(tensors):
            tensors.append(value)
        return [_TENSOR, place]
    if isinstance(value, list):
        return [_LIST, [encode(item, tensors) for item in value]]
    name = type(value).__name__
    if not is_dataclass(value) or _FORMS.get(name) is not type(value):
        raise FormError(f"weights of the form {name} are not kept")
    return [name, {field.name: encode(getattr(value, field.name), tensors) for field in fields(value)}]


def decode(data: Any, tensors: list[Tensor]) -> Any:
    """The value of which `encode` made the data. Raises FormError for data that it did not make."""
    if data is None or isinstance(data, int):
        return data
    try:
        kind, content = data
        if kind == _TENSOR:
            return tensors[content]
        if kind == _LIST:
            return [decode(item, tensors) for item in content]
        return _FORMS[kind](**{name: decode(item, tensors) for name, item in content.items()})
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise FormError(f"the form of a weight cannot be read: {error!r}") from error
