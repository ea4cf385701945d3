"""The events that a parser emits for an answer: reasoning, content and tool calls, in the order of the text."""

from typing import Protocol

import msgspec


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of the model's thinking."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """A piece of the answer itself."""

    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """The start of a tool call. Calls are numbered from 0.

    id: the id that the model gave to the call, in the few formats with ids (Kimi-K2); the server creates the others
    """

    index: int
    name: str
    id: str | None = None


class ToolArguments(msgspec.Struct, frozen=True):
    """A piece of a call's arguments. The joined pieces of an index are JSON, if the model's text was complete."""

    index: int
    text: str


Event = Reasoning | Content | ToolCall | ToolArguments


class Parser(Protocol):
    """Reads one answer. Any split of the text results in the same events, except where texts are cut. It never raises,
    and text that belongs to no marker or call is content."""

    def feed(self, text: str) -> list[Event]:
        """Process the next part of the answer's text."""
        ...

    def finish(self) -> list[Event]:
        """End the answer, and return the events of the text that was held back."""
        ...
