"""LlamaIndex's model for servers like OpenAI's."""

import asyncio
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from question import Question, answer


def ask(question: Question) -> dict[str, object]:
    options: dict[str, Any] = {
        "api_base": question.url, "api_key": question.key, "model": question.model, "temperature": 0,
        "max_tokens": question.tokens, "max_retries": 0, "context_window": 2048,
    }  # fmt: skip
    chat, completion = (OpenAILike(**options, is_chat_model=is_chat) for is_chat in (True, False))
    messages = [ChatMessage(role=message["role"], content=message["content"]) for message in question.messages]
    whole = chat.chat(messages)

    async def ask_later() -> tuple[str, str]:
        at_once = await chat.achat(messages)
        return at_once.message.content, "".join([part.delta async for part in await chat.astream_chat(messages)])

    later, later_in_a_stream = asyncio.run(ask_later())

    return {
        "chat": whole.message.content,
        "chat/stream": "".join(part.delta for part in chat.stream_chat(messages)),
        "chat/async": later,
        "chat/async stream": later_in_a_stream,
        "completion": completion.complete(question.prompt).text,
        "completion/stream": "".join(part.delta for part in completion.stream_complete(question.prompt)),
        "chat usage": [whole.raw.usage.prompt_tokens, whole.raw.usage.completion_tokens],
        "unknown model": answer(lambda: OpenAILike(**options | {"model": "no"}).complete(question.prompt)),
        "long prompt": answer(lambda: completion.complete(question.long_prompt)),
    }


if __name__ == "__main__":
    Question.answer_with(ask)
