"""The output of a response: converts the events of an output to items and their stream events."""

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.parsing.events import Content, Event, Reasoning, ToolCall
from quire.server.response_items import PREFIXES, Item, encrypted
from quire.server.response_store import new_id
from quire.server.response_tools import Named, shell_action
from quire.server.running_chat import Answer


class Events(list[bytes]):
    """The pending events of a stream, numbered from 0."""

    def __init__(self) -> None:
        self._number = 0

    def make(self, kind: str, **fields: Any) -> None:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        self.append(b"event: %s\ndata: %s\n\n" % (kind.encode(), data))
        self._number += 1

    def take(self) -> bytes:
        taken = b"".join(self)
        self.clear()
        return taken


# For each type of text event, the type of its item and the item's initial fields.
_KINDS = {Reasoning: "reasoning", Content: "message"}
_BLANK: dict[str, Item] = {"reasoning": {"summary": []}, "message": {"role": "assistant"}}
# The field of an item that contains a call's text, and the name of its events.
_CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}


class Output:
    """The output items of a response and their events, built while the output is generated.

    items: the complete items.
    """

    def __init__(self, events: Events, tools: Mapping[str, Named] | None = None, encrypts: bool = False) -> None:
        """tools: the tools that the model may call, by the names that it uses. encrypts: whether reasoning items have
        an encrypted_content."""
        self.items: list[Item] = []
        self._events = events
        self._tools = tools or {}
        self._encrypts = encrypts
        self._open: Item = {"type": None}  # the item whose text is arriving
        self._texts: list[str] = []  # pieces of its text
        self._logprobs: list[Any] = []

    def add(self, event: Event, answer: Answer, logprobs: list[Any]) -> None:
        """logprobs: the logprobs of the event's tokens."""
        if isinstance(event, ToolCall):
            call_id = answer.tool_calls[event.index].id
            tool = self._tools.get(event.name)
            plain = {"type": "function_call", "call_id": call_id, "name": event.name}
            call = plain if tool is None else tool.call(call_id)
            text = {_CALLS[call["type"]][0]: ""} if call["type"] in _CALLS else {}
            self._begin({"id": new_id(PREFIXES[call["type"]]), **call, **text})
            return
        kind = _KINDS.get(type(event))
        if kind is not None and self._open["type"] != kind:
            self._begin({"type": kind, "id": new_id(PREFIXES[kind]), **_BLANK[kind]})
        self._delta(event.text, logprobs if kind == "message" else [])

    def replay(self, item: Item) -> None:
        """Add a complete item, with its whole text at once."""
        kind = item["type"]
        if kind in _CALLS:
            field, _ = _CALLS[kind]
            self._begin({**item, field: ""})
            self._delta(item[field], [])
        elif kind in _BLANK:
            part = item["content"][0]
            self._begin(dict(item))
            self._delta(part["text"], part.get("logprobs", []))
        else:
            self._begin(dict(item))
            self._texts = [msgspec.json.encode(item["action"]).decode()]
        self.close(item["status"])

    def close(self, status: str = "completed") -> None:
        """Complete the open item, if there is one."""
        item = self._open
        text = "".join(self._texts)
        kind = item["type"]
        if kind is None:
            return
        item["status"] = status
        if kind in _CALLS:
            field, name = _CALLS[kind]
            item[field] = text
            self._event(f"{name}.done", **({"name": item["name"]} if kind == "function_call" else {}), **{field: text})
        elif kind in _BLANK:
            item["content"] = [part := self._part(text)]
            if kind == "reasoning" and self._encrypts:
                item["encrypted_content"] = encrypted(text)
            logprobs = {"logprobs": self._logprobs} if kind == "message" else {}
            self._event(f"{part['type']}.done", text=text, **logprobs)
            self._event("content_part.done", part=part)
        else:
            item["action"] = shell_action(text)
        self._events.make("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._open = {"type": None}
        self._texts = []
        self._logprobs = []

    def _begin(self, item: Item) -> None:
        self.close()
        self._open = {**item, "status": "in_progress"}
        if item["type"] in _BLANK:
            self._open["content"] = []
        self._events.make("response.output_item.added", output_index=len(self.items), item=self._open)
        if item["type"] in _BLANK:
            self._event("content_part.added", part=self._part(""))

    def _delta(self, text: str, logprobs: list[Any]) -> None:
        self._texts.append(text)
        self._logprobs += logprobs
        kind = self._open["type"]
        if kind == "message":
            self._event("output_text.delta", delta=text, logprobs=logprobs)
        elif kind == "reasoning":
            self._event("reasoning_text.delta", delta=text)
        elif kind in _CALLS:
            self._event(f"{_CALLS[kind][1]}.delta", delta=text)

    def _event(self, kind: str, **fields: Any) -> None:
        if self._open["type"] in _BLANK:
            fields["content_index"] = 0
        self._events.make(f"response.{kind}", item_id=self._open["id"], output_index=len(self.items), **fields)

    def _part(self, text: str) -> Item:
        if self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
