"""The messages of Ollama's API, and their translation to OpenAI's."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, Field

from quire.server.fields import Strings

Images = Annotated[Strings, Field(description="Pictures in base64, for models that see.")]


class Function(BaseModel):
    name: str
    arguments: dict[str, Any]


class ToolCall(BaseModel):
    id: str | None = None
    function: Function


class OllamaMessage(BaseModel):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None


OllamaMessages = Annotated[list[OllamaMessage], Field(fail_fast=True)]


def openai_messages(messages: Iterable[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """Yield OpenAI's messages. Ollama's tool results come in the order of the calls, so ids are optional."""
    numbers = count()
    waiting = deque[str]()
    for message in messages:
        calls = []
        for call in message.tool_calls or ():
            waiting.append(call.id or f"call{next(numbers):05}")
            arguments = msgspec.json.encode(call.function.arguments).decode()
            function = {"name": call.function.name, "arguments": arguments}
            calls.append({"id": waiting[-1], "type": "function", "function": function})
        content = _with_images(message.content or "", message.images)
        fields = {"role": message.role, "content": content, "reasoning": message.thinking}
        if message.role == "tool":
            answered = message.tool_call_id or (waiting.popleft() if waiting else None)
            fields |= {"tool_call_id": answered, "name": message.tool_name}
        yield {**fields, "tool_calls": calls or None}


def _with_images(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    if not images:
        return text
    parts = [{"type": "image_url", "image_url": {"url": f"data:image;base64,{image}"}} for image in images]
    return [*parts, {"type": "text", "text": text}]
