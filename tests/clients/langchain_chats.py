"""What is asked of each chat model of LangChain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from question import WEATHER, Place, Question, answer


def ask_chat(question: Question, model: Callable[..., BaseChatModel]) -> dict[str, object]:
    """model: makes the chat model with the arguments `model` and `tokens`."""
    chat = model(question.model, question.tokens)
    whole, streamed = chat.invoke(question.prompt), gathered(chat, question.prompt)

    async def ask_later() -> tuple[str, str]:
        at_once = await chat.ainvoke(question.prompt)
        return at_once.text, "".join([chunk.text async for chunk in chat.astream(question.prompt)])

    later, later_in_a_stream = asyncio.run(ask_later())

    long = model(question.model, 120)
    tooled = long.bind_tools([{"type": "function", "function": WEATHER}])
    called = tooled.invoke(question.weather)
    result = ToolMessage(question.sky, tool_call_id=called.tool_calls[0]["id"])
    return {
        "chat": whole.text,
        "chat/stream": streamed.text,
        "chat/async": later,
        "chat/async stream": later_in_a_stream,
        "chat usage": usage(whole),
        "chat usage/stream": usage(streamed),
        "tools": calls(called),
        "tools/stream": calls(gathered(tooled, question.weather)),
        "result": tooled.invoke([HumanMessage(question.weather), called, result]).text,
        "structured": long.with_structured_output(Place).invoke(question.prompt).city,
        "structured/schema": long.with_structured_output(Place, method="json_schema").invoke(question.prompt).city,
        "unknown model": answer(lambda: model("no", question.tokens).invoke(question.prompt)),
        "long prompt": answer(lambda: chat.invoke(question.long_prompt)),
    }


def gathered(chat: Any, prompt: str) -> AIMessage:
    chunks = list(chat.stream(prompt))
    message: AIMessage = sum(chunks[1:], chunks[0])
    return message


def calls(message: AIMessage) -> list[list[object]]:
    return [[call["name"], call["args"]] for call in message.tool_calls]


def usage(message: AIMessage) -> list[int]:
    assert message.usage_metadata is not None
    return [message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"]]
