"""Custom tools: their input is free text, or text that follows a grammar, instead of a JSON object.

The chat template shows a function with one parameter, `input`, and the model calls it in its own format. The server
decodes the JSON text of the arguments as it arrives. If the request names the tool, the whole response is the input.
"""

import json
import re
from collections.abc import Collection, Iterable
from typing import Any, Literal, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import from_json

from quire.parsing.events import Event, Parser, ToolArguments, ToolCall
from quire.server.fields import Function, fail

PARAMETER = "input"


class Grammar(BaseModel):
    syntax: Literal["lark", "regex"]
    definition: str = Field(min_length=1)


class CustomFormat(BaseModel):
    type: Literal["text", "grammar"] = "text"
    grammar: Grammar | None = Field(None, description="With type grammar.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "grammar" and self.grammar is None:
            raise fail("missing", "grammar: Field required")
        return self


class Custom(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    description: str | None = None
    format: CustomFormat | None = Field(None, description="What the input must look like; default: any text.")


class CustomTool(BaseModel):
    """A tool with text input."""

    model_config = ConfigDict(extra="allow")

    type: Literal["custom"]
    custom: Custom

    @property
    def grammar(self) -> Grammar | None:
        return None if self.custom.format is None else self.custom.format.grammar

    @property
    def constraint(self) -> dict[str, str] | None:
        """Return the input's format as a value of structured_outputs."""
        if self.grammar is None:
            return None
        return {"grammar" if self.grammar.syntax == "lark" else "regex": self.grammar.definition}

    @property
    def function(self) -> Function:
        """Return the function that the chat template shows to the model."""
        grammar = self.grammar
        schema = {"type": "string"}
        description = self.custom.description or ""
        if grammar is not None:
            form = "grammar in Lark's syntax" if grammar.syntax == "lark" else "regular expression"
            description = f"{description}\n\nThe input matches this {form}:\n{grammar.definition}".strip()
        if grammar is not None and grammar.syntax == "regex":
            schema["pattern"] = f"^(?:{grammar.definition})$"
        parameters = {
            "type": "object",
            "properties": {PARAMETER: schema},
            "required": [PARAMETER],
            "additionalProperties": False,
        }
        return Function(name=self.custom.name, description=description or None, parameters=parameters)


class CustomName(BaseModel):
    name: str


class NamedCustomTool(BaseModel):
    type: Literal["custom"]
    custom: CustomName


def arguments_of(text: str) -> str:
    """Return the arguments for a call of the function that represents a custom tool."""
    return msgspec.json.encode({PARAMETER: text}).decode()


def as_functions(calls: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return an assistant message's tool calls, with custom-tool calls as function calls, which templates support.

    Raises PydanticCustomError for a custom call without a name or an input.
    """
    translated = []
    for call in calls:
        if call.get("type") == "custom":
            custom = call.get("custom")
            if not isinstance(custom, dict) or not all(isinstance(custom.get(key), str) for key in ("name", "input")):
                raise fail("custom", "A custom call should have a name and an input: {'custom': {'name', 'input'}}")
            function = {"name": custom["name"], "arguments": arguments_of(custom["input"])}
            call = {**call, "type": "function", "function": function}
            del call["custom"]
        translated.append(call)
    return translated


_HEAD = re.compile(rf'\s*\{{\s*"{PARAMETER}"\s*:\s*"')
# The part of a JSON string that can be decoded: no incomplete escape, and no half of a surrogate pair.
_CHARACTERS = re.compile(
    r'(?:[^"\\]+|\\[^u]|\\u(?!d[89a-f])[0-9a-f]{4}|\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2})*',
    re.IGNORECASE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_LONGEST_ESCAPE = 12  # characters of a surrogate pair


def _decoded(text: str) -> str:
    """Decode a JSON string. A backslash before a character that JSON does not allow is kept as it is."""
    valid = _ESCAPE.sub(lambda escape: escape[0] if escape[1] in '"\\/bfnrtu' else f"\\\\{escape[1]}", text)
    return str(json.loads(f'"{valid}"', strict=False))


class InputDecoder:
    """Decodes the arguments of one call as they arrive."""

    def __init__(self) -> None:
        self._json = ""  # not decoded yet
        self._is_open = False  # the input has begun

    def feed(self, piece: str) -> str:
        """Return the new part of the input."""
        self._json += piece
        if not self._is_open and (head := _HEAD.match(self._json)):
            self._is_open = True
            self._json = self._json[head.end() :]
        if not self._is_open:
            return ""
        texts = [self._take()]
        while len(self._json) >= _LONGEST_ESCAPE and self._json[0] == "\\":  # an invalid escape
            self._json = self._json[2:]
            texts += ["\ufffd", self._take()]
        return "".join(texts)

    def _take(self) -> str:
        known = _CHARACTERS.match(self._json)
        assert known is not None
        self._json = self._json[known.end() :]
        return _decoded(known[0])

    def finish(self) -> str:
        """Return the rest of the input. A parameter with another name is used as the input, and so is text that is not
        JSON."""
        if self._is_open:
            return ""
        try:
            value = from_json(self._json, allow_partial="trailing-strings")
        except ValueError:
            return self._json
        texts = [text for text in value.values() if isinstance(text, str)] if isinstance(value, dict) else []
        chosen = value.get(PARAMETER) if isinstance(value, dict) else None
        return chosen if isinstance(chosen, str) else texts[0] if len(texts) == 1 else self._json


class CustomInputs:
    """A parser that returns the input of custom-tool calls as their arguments, instead of JSON text."""

    def __init__(self, parser: Parser, names: Collection[str]) -> None:
        """names: the custom tools."""
        self._parser = parser
        self._names = names
        self._decoder: InputDecoder | None = None  # decoder of the call whose arguments are arriving
        self._index = 0  # index of this call

    def feed(self, text: str) -> list[Event]:
        return self._decoded(self._parser.feed(text))

    def finish(self) -> list[Event]:
        return [*self._decoded(self._parser.finish()), *self._end()]

    def _decoded(self, events: Iterable[Event]) -> list[Event]:
        decoded: list[Event] = []
        for event in events:
            if self._decoder is not None and isinstance(event, ToolArguments) and event.index == self._index:
                if news := self._decoder.feed(event.text):
                    decoded.append(ToolArguments(event.index, news))
                continue
            decoded += self._end()
            if isinstance(event, ToolCall) and event.name in self._names:
                self._decoder = InputDecoder()
                self._index = event.index
            decoded.append(event)
        return decoded

    def _end(self) -> list[Event]:
        decoder = self._decoder
        self._decoder = None
        rest = "" if decoder is None else decoder.finish()
        return [ToolArguments(self._index, rest)] if rest else []
