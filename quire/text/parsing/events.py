"""What a parser finds in the text of an answer."""

import msgspec


class Reasoning(msgspec.Struct):
    """Text of the model's thinking."""

    text: str


class Content(msgspec.Struct):
    """Text of the answer itself."""

    text: str


class ToolCall(msgspec.Struct):
    """A tool call begins. index: 0 for the first call of an answer."""

    index: int
    name: str


class ToolArguments(msgspec.Struct):
    """A piece of a tool call's arguments. All pieces of a call, joined, are JSON text."""

    index: int
    text: str


Event = Reasoning | Content | ToolCall | ToolArguments
