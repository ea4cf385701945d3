"""LlamaIndex's models for servers like OpenAI's and Ollama's."""

import asyncio
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike
from ollama import AsyncClient, Client
from question import Place, Question, answer


def ask(question: Question) -> dict[str, object]:
    server: dict[str, Any] = {
        "api_base": question.url,
        "api_key": question.key,
        "model": question.model,
        "temperature": 0,
        "max_retries": 0,
        "context_window": 2048,
    }
    options = {**server, "max_tokens": question.tokens}
    chat, completion = (OpenAILike(**options, is_chat_model=is_chat) for is_chat in (True, False))
    messages = [ChatMessage(role=message["role"], content=message["content"]) for message in question.messages]
    whole = chat.chat(messages)

    async def ask_later() -> tuple[str, str]:
        at_once = await chat.achat(messages)
        return at_once.message.content, "".join([part.delta async for part in await chat.astream_chat(messages)])

    later, later_in_a_stream = asyncio.run(ask_later())
    headers = {"x-api-key": question.key}
    ollama: dict[str, Any] = {
        "model": question.model,
        "context_window": 2048,
        "client": Client(question.host, headers=headers),
        "async_client": AsyncClient(question.host, headers=headers),
        "temperature": 0,
    }
    talker = Ollama(**ollama, additional_kwargs={"num_predict": question.tokens})
    answers = {
        **ask_tools(question, OpenAILike(**server, is_chat_model=True, is_function_calling_model=True, max_tokens=120)),
        **{f"{name}/ollama": found for name, found in ask_tools(question, Ollama(**ollama)).items()},
    }
    return {
        **answers,
        "chat": whole.message.content,
        "chat/stream": "".join(part.delta for part in chat.stream_chat(messages)),
        "chat/async": later,
        "chat/async stream": later_in_a_stream,
        "chat/ollama": talker.chat(messages).message.content,
        "chat/ollama stream": "".join(part.delta or "" for part in talker.stream_chat(messages)),
        "completion": completion.complete(question.prompt).text,
        "completion/stream": "".join(part.delta for part in completion.stream_complete(question.prompt)),
        "chat usage": [whole.raw.usage.prompt_tokens, whole.raw.usage.completion_tokens],
        "unknown model": answer(lambda: OpenAILike(**options | {"model": "no"}).complete(question.prompt)),
        "long prompt": answer(lambda: completion.complete(question.long_prompt)),
    }


def ask_tools(question: Question, model: FunctionCallingLLM) -> dict[str, object]:
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        return question.sky

    tool = FunctionTool.from_defaults(get_weather, description="Get the weather of a city.")
    called = model.chat_with_tools([tool], user_msg=question.weather)
    [call] = model.get_tool_calls_from_response(called)
    turns = [
        ChatMessage(role="user", content=question.weather),
        called.message,
        ChatMessage(
            role="tool",
            content=tool(**call.tool_kwargs).content,
            tool_call_id=call.tool_id,
            additional_kwargs={"tool_call_id": call.tool_id},
        ),
    ]
    *_, streamed = model.stream_chat_with_tools([tool], user_msg=question.weather)
    [streamed_call] = model.get_tool_calls_from_response(streamed)
    return {
        "tools": [[call.tool_name, call.tool_kwargs]],
        "tools/stream": [[streamed_call.tool_name, streamed_call.tool_kwargs]],
        "result": model.chat_with_tools([tool], chat_history=turns).message.content,
        "structured": model.as_structured_llm(Place).complete(question.prompt).raw.city,
    }


if __name__ == "__main__":
    Question.answer_with(ask)
