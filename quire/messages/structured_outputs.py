"""Constraints on a request's output: vLLM's StructuredOutputsParams, and the limits of its thinking."""

import json
from typing import Any, Self

import msgspec

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_TEXTS = ("regex", "grammar", "structural_tag", "whitespace_pattern")
_FLAGS = ("json_object", "disable_any_whitespace", "disable_additional_properties")


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """A constraint on the text of an output, of exactly one kind. Raises ValueError or TypeError, naming the field.

    json: a JSON schema, as a dict or as JSON text (a dict is stored as text). json_object: any JSON object.
    regex: a regular expression for the whole text. choice: the text is one of these.
    grammar: a context-free grammar in Lark's syntax, or in EBNF as llama.cpp writes it (GBNF).
    structural_tag: JSON text that defines which tags may occur in free text, and their contents.
    disable_any_whitespace: JSON without any whitespace. disable_additional_properties: objects of a JSON schema have
        only the properties that the schema lists. whitespace_pattern: a regular expression for the whitespace between
        the elements of JSON.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    @classmethod
    def create(cls, fields: dict[str, Any]) -> Self:
        """Create from a dict of the fields. Raises ValueError or TypeError."""
        unknown = sorted(fields.keys() - set(cls.__struct_fields__))
        if unknown:
            message = f"structured_outputs has no field {unknown[0]!r}; it has {', '.join(cls.__struct_fields__)}"
            raise ValueError(message)
        return cls(**fields)

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) > 1:
            message = f"You can only use one kind of structured outputs constraint but multiple are specified: {given}"
            raise ValueError(message)
        if not given:
            raise ValueError("You must use one kind of structured outputs constraint but none are specified")
        for name in _TEXTS:
            _check_text(name, getattr(self, name), optional=True)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool | None):
                raise TypeError(f"structured_outputs: {name} must be True or False, got {getattr(self, name)!r}.")
        if self.choice is not None:
            if not isinstance(self.choice, list) or not self.choice:
                message = f"structured_outputs: choice must be a list of one or more strings, got {self.choice!r}."
                raise ValueError(message)
            for text in self.choice:
                _check_text("choice", text)
        if self.json is not None:
            msgspec.structs.force_setattr(self, "json", _schema_text(self.json))


def _check_text(name: str, text: object, optional: bool = False) -> None:
    if not isinstance(text, str) and not (optional and text is None):
        raise TypeError(f"structured_outputs: {name} must contain text, got {type(text).__name__}.")
    try:
        str(text).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"structured_outputs: {name} is not valid Unicode: it has half a surrogate pair.") from error


def _schema_text(schema: object) -> str:
    """Return a JSON schema as JSON text. Raises ValueError or TypeError unless it is an object, true or false."""
    try:
        if isinstance(schema, str):
            _check_text("json", schema)
            text = schema
            schema = json.loads(schema)
        else:
            text = json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"structured_outputs: json is not a JSON schema: {reason}") from error
    if not isinstance(schema, dict | bool):
        raise TypeError(f"structured_outputs: json must be a JSON schema, an object, got {type(schema).__name__}.")
    return text


class ThinkingLimits(msgspec.Struct, array_like=True, omit_defaults=True):
    """Where an output's thinking begins and ends, and how long it may be.

    end_ids, start_ids: the tokens of the markers. is_open: the output begins inside the thinking. budget: the number of
    tokens of thinking after which it is closed; None for no limit. closing_ids: the tokens that close it, which end
    with end_ids; [] for end_ids alone. call_ids: token ids of each text that begins a tool call, which also ends the
    thinking.
    """

    end_ids: list[int]
    start_ids: list[int] = []
    is_open: bool = False
    budget: int | None = None
    closing_ids: list[int] = []
    call_ids: list[list[int]] = []
