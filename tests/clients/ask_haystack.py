"""Haystack's generators for OpenAI's chats and responses, and for Ollama's API."""

import os
from typing import Any

from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import Tool
from haystack.utils import Secret
from haystack_integrations.components.generators.ollama import OllamaChatGenerator
from question import WEATHER, Place, Question, answer


def ask(question: Question) -> dict[str, object]:
    os.environ["OLLAMA_API_KEY"] = question.key  # Haystack's generator gives its client no headers
    server: dict[str, Any] = {
        "api_base_url": question.url,
        "api_key": Secret.from_token(question.key),
        "max_retries": 0,
    }

    def chat(model: str, tokens: int, **options: Any) -> OpenAIChatGenerator:
        return OpenAIChatGenerator(
            **server, model=model, generation_kwargs={"temperature": 0, "max_tokens": tokens, **options}
        )

    def response(model: str, tokens: int, **options: Any) -> OpenAIResponsesChatGenerator:
        if "response_format" in options:
            options = {"text_format": options["response_format"]}
        return OpenAIResponsesChatGenerator(
            **server, model=model, generation_kwargs={"temperature": 0, "max_output_tokens": tokens, **options}
        )

    def ollama(model: str, tokens: int, response_format: Any = None) -> OllamaChatGenerator:
        schema = None if response_format is None else response_format.model_json_schema()
        options = {"temperature": 0, "num_predict": tokens}
        return OllamaChatGenerator(model, question.host, generation_kwargs=options, response_format=schema)

    answers = {}
    for name, generator in {"chats": chat, "responses": response, "ollama": ollama}.items():
        for key, value in ask_generator(question, generator).items():
            answers[f"{key}{' ' if '/' in key else '/'}{name}"] = value
    return answers


def ask_generator(question: Question, generator: Any) -> dict[str, object]:
    """generator: makes one with the arguments `model` and `tokens`."""
    tool = Tool(**WEATHER, function=lambda city: question.sky)
    short, long = generator(question.model, question.tokens), generator(question.model, 120)
    user, turns = [ChatMessage.from_user(question.prompt)], [ChatMessage.from_user(question.weather)]
    chunks: list[StreamingChunk] = []
    short.run(user, streaming_callback=chunks.append)
    [called] = long.run(turns, tools=[tool])["replies"]
    [streamed] = long.run(turns, tools=[tool], streaming_callback=chunks[:].append)["replies"]
    result = ChatMessage.from_tool(question.sky, origin=called.tool_calls[0])
    [told] = long.run([*turns, called, result], tools=[tool])["replies"]
    place = generator(question.model, 120, response_format=Place).run(user)["replies"][0].text
    return {
        "chat": short.run(user)["replies"][0].text,
        "chat/stream": "".join(chunk.content for chunk in chunks),
        "tools": calls(called),
        "tools/stream": calls(streamed),
        "result": told.text,
        "structured": Place.model_validate_json(place).city,
        "unknown model": answer(lambda: generator("no", question.tokens).run(user)),
        "long prompt": answer(lambda: short.run([ChatMessage.from_user(question.long_prompt)])),
    }


def calls(message: ChatMessage) -> list[list[object]]:
    return [[call.tool_name, call.arguments] for call in message.tool_calls]


if __name__ == "__main__":
    Question.answer_with(ask)
