"""LiteLLM, as it asks servers of OpenAI's, Anthropic's and Ollama's API, and vLLM ("hosted_vllm/")."""

import asyncio
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices

import litellm
from question import WEATHER, Place, Question, answer


def ask(question: Question) -> dict[str, object]:
    litellm.suppress_debug_info = True
    options: dict[str, Any] = {"api_key": question.key, "temperature": 0, "max_tokens": question.tokens}
    openai = {**options, "api_base": question.url, "model": f"openai/{question.model}"}
    vllm = {**openai, "model": f"hosted_vllm/{question.model}"}
    anthropic, ollama, ollama_chat = (
        {**options, "api_base": question.host, "model": f"{name}/{question.model}"}
        for name in ("anthropic", "ollama", "ollama_chat")
    )
    text = {**openai, "model": f"text-completion-openai/{question.model}", "prompt": question.prompt}

    async def ask_later() -> tuple[str, str]:
        at_once = await litellm.acompletion(**openai, messages=question.messages)
        chunks = await litellm.acompletion(**openai, messages=question.messages, stream=True)
        return at_once.choices[0].message.content, said([chunk async for chunk in chunks])

    later, later_in_a_stream = asyncio.run(ask_later())
    answers = {
        "chat/async": later,
        "chat/async stream": later_in_a_stream,
        "completion": litellm.text_completion(**text).choices[0].text,
        "completion/stream": "".join(c.choices[0].text or "" for c in litellm.text_completion(**text, stream=True)),
        "long prompt": answer(lambda: litellm.text_completion(**{**text, "prompt": question.long_prompt})),
        **ask_chat(question, openai),
        **ask_tools(question, openai),
    }
    for name, route in {"vLLM": vllm, "anthropic": anthropic, "ollama_chat": ollama_chat}.items():
        found = {**ask_chat(question, route), **ask_tools(question, route)}
        answers.update({f"{key}{' ' if '/' in key else '/'}{name}": value for key, value in found.items()})
    # litellm writes what it asks "ollama/" into a prompt of its own, tools too.
    for key, value in ask_chat(question, ollama).items():
        answers[key.replace("chat", "generate") if "chat" in key else f"{key}/ollama"] = value
    return answers


def ask_chat(question: Question, route: dict[str, Any]) -> dict[str, object]:
    chat = {**route, "messages": question.messages}
    whole = litellm.completion(**chat)
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    place = litellm.completion(**chat, response_format=Place).choices[0].message.content
    unknown = {**chat, "model": f"{route['model'].partition('/')[0]}/no"}
    return {
        "chat": whole.choices[0].message.content,
        "chat/stream": said(chunks),
        "chat usage": usage(whole),
        "chat usage/stream": usage(chunks[-1]),
        "structured": Place.model_validate_json(place).city,
        "unknown model": answer(lambda: litellm.completion(**unknown)),
    }


def ask_tools(question: Question, route: dict[str, Any]) -> dict[str, object]:
    tools = {**route, "max_tokens": 120, "tools": [{"type": "function", "function": WEATHER}]}
    turns: list[Any] = [{"role": "user", "content": question.weather}]
    called = litellm.completion(**tools, messages=turns)
    called_in_a_stream = litellm.stream_chunk_builder(list(litellm.completion(**tools, messages=turns, stream=True)))
    message = called.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": question.sky}
    told = litellm.completion(**tools, messages=[*turns, message, result])
    return {
        "tools": calls(called),
        "tools/stream": calls(called_in_a_stream),
        "result": told.choices[0].message.content,
    }


def said(chunks: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def usage(response: Any) -> list[int]:
    return [response.usage.prompt_tokens, response.usage.completion_tokens]


def calls(response: Any) -> list[list[object]]:
    found = response.choices[0].message.tool_calls or ()
    return [[call.function.name, json.loads(call.function.arguments)] for call in found]


if __name__ == "__main__":
    Question.answer_with(ask)
