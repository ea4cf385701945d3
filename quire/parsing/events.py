"""What a parser tells of an answer: its reasoning, its content, and its tool calls, in the order of the text."""

from typing import Protocol

import msgspec


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of the model's thinking."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """A piece of the answer itself."""

    text: str


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call begins. Calls are numbered from 0.

    id: the id that the model gave to the call, in the few formats where it does (Kimi-K2); the server makes the others
    """

    index: int
    name: str
    id: str | None = None


class ToolArguments(msgspec.Struct, frozen=True):
    """A piece of the arguments of a call. All pieces of an index joined are JSON, if the model's text was complete."""

    index: int
    text: str


Event = Reasoning | Content | ToolCall | ToolArguments


class Parser(Protocol):
    """Reads one answer. Any split of the text gives the same events, apart from where texts are cut. It never raises,
    and text that belongs to no marker or call is content."""

    def feed(self, text: str) -> list[Event]:
        """Takes the next part of the answer's text."""
        ...

    def finish(self) -> list[Event]:
        """Ends the answer, and returns the events of the text that was held back."""
        ...
