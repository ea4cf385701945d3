"""LangChain's OpenAI models."""

import asyncio
from typing import Any

from langchain_openai import ChatOpenAI, OpenAI
from question import Question, answer


def ask(question: Question) -> dict[str, object]:
    options: dict[str, Any] = {
        "base_url": question.url, "api_key": question.key, "model": question.model, "temperature": 0,
        "max_tokens": question.tokens, "max_retries": 0,
    }  # fmt: skip
    chat, completion = ChatOpenAI(**options, stream_usage=True), OpenAI(**options)
    whole = chat.invoke(question.prompt)
    chunks = list(chat.stream(question.prompt))
    gathered = sum(chunks[1:], chunks[0])

    async def ask_later() -> tuple[str, str]:
        at_once = await chat.ainvoke(question.prompt)
        return at_once.text, "".join([chunk.text async for chunk in chat.astream(question.prompt)])

    later, later_in_a_stream = asyncio.run(ask_later())

    return {
        "chat": whole.text,
        "chat/stream": gathered.text,
        "chat/async": later,
        "chat/async stream": later_in_a_stream,
        "completion": completion.invoke(question.prompt),
        "completion/stream": "".join(completion.stream(question.prompt)),
        "chat usage": [whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]],
        "chat usage/stream": [gathered.usage_metadata["input_tokens"], gathered.usage_metadata["output_tokens"]],
        "unknown model": answer(lambda: ChatOpenAI(**options | {"model": "no"}).invoke(question.prompt)),
        "long prompt": answer(lambda: chat.invoke(question.long_prompt)),
    }


if __name__ == "__main__":
    Question.answer_with(ask)
