"""Messages in the answers of chats, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def joined(events: list[Any], index: int = 0) -> dict[str, Any]:
    """The message and the finish reason of one choice of a stream, checked to have OpenAI's shape."""
    message: dict[str, Any] = {"content": None, "reasoning": None, "tool_calls": []}
    reasons = []
    for choice in (choice for event in events for choice in event["choices"] if choice["index"] == index):
        assert not reasons, "nothing comes behind the end"
        delta = choice["delta"]
        message["content"] = (
            (message["content"] or "") + delta["content"] if delta.get("content") else message["content"]
        )
        message["reasoning"] = (
            (message["reasoning"] or "") + delta["reasoning"] if delta.get("reasoning") else message["reasoning"]
        )
        assert delta.get("reasoning_content") == delta.get("reasoning")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call.keys() == {"index", "id", "type", "function"}
                assert (call["type"], call["function"]["arguments"]) == ("function", "")
                message["tool_calls"].append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                assert call["index"] == len(message["tool_calls"]) - 1
                assert call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"}
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return {**message, "finish_reason": reasons[0]}


def message_of(answer: Any, index: int = 0) -> dict[str, Any]:
    """The same of a whole answer, or of a stream."""
    if isinstance(answer, list):
        return joined(answer, index)
    choice = answer["choices"][index]
    message = choice["message"]
    assert message.get("reasoning_content") == message["reasoning"]
    wanted = {name: message.get(name) for name in ("content", "reasoning")}
    return {**wanted, "tool_calls": message.get("tool_calls", []), "finish_reason": choice["finish_reason"]}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
