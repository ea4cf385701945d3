"""The suffix that a checkpoint appends to the names of its markers: <think:opensource> instead of <think>."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

_SUFFIX = re.compile(r"</?(?:think|tool_calls?|arg_key|arg_value)(:[^\s<>]+)>")
_NAME = re.compile(r"(</?\w+)>")


def suffix_in(texts: Iterable[str]) -> str:
    """Return the suffix of the markers in tokens or in a chat template, "" if they have none."""
    found = next((found for text in texts if (found := _SUFFIX.search(text))), None)
    return found[1] if found else ""


def of_checkpoint(name: str, known: dict[str, Any], vocabulary: Callable[[], Iterable[str]]) -> str:
    """Return the name of a format, or of its variant with the suffix of a vocabulary's tokens. known: the tool call or
    reasoning formats by name, to which the variant is added
    """
    suffix = suffix_in(vocabulary()) if known[name].is_suffixed else ""
    if suffix:
        known[name + suffix] = msgspec.structs.replace(known[name], **_markers(known[name], suffix))
    return name + suffix


def _markers(format: Any, suffix: str) -> dict[str, Any]:
    """Return the fields of a format that contain markers, with the suffix added."""
    fields = msgspec.structs.asdict(format)
    return {field: _with_suffix(value, suffix) for field, value in fields.items() if isinstance(value, tuple)}


def _with_suffix(value: Any, suffix: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_with_suffix(part, suffix) for part in value)
    return _NAME.sub(rf"\1{suffix}>", value)
