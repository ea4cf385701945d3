"""LiteLLM, as it asks any OpenAI server ("openai/") and as it asks vLLM ("hosted_vllm/")."""

import asyncio
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices

import litellm
from question import Question, answer


def ask(question: Question) -> dict[str, object]:
    litellm.suppress_debug_info = True
    options: dict[str, Any] = {
        "api_base": question.url, "api_key": question.key, "temperature": 0, "max_tokens": question.tokens,
        "num_retries": 0,
    }  # fmt: skip
    chat = {**options, "model": f"openai/{question.model}", "messages": question.messages}
    vllm = {**chat, "model": f"hosted_vllm/{question.model}"}
    text = {**options, "model": f"text-completion-openai/{question.model}", "prompt": question.prompt}
    whole = litellm.completion(**chat)
    *chunks, last = litellm.completion(**chat, stream=True, stream_options={"include_usage": True})

    async def ask_later() -> tuple[str, str]:
        at_once = await litellm.acompletion(**chat)
        chunks = [chunk async for chunk in await litellm.acompletion(**chat, stream=True)]
        return at_once.choices[0].message.content, said(chunks)

    later, later_in_a_stream = asyncio.run(ask_later())

    return {
        "chat": whole.choices[0].message.content,
        "chat/vLLM": litellm.completion(**vllm).choices[0].message.content,
        "chat/stream": said(chunks),
        "chat/vLLM stream": said(litellm.completion(**vllm, stream=True)),
        "chat/async": later,
        "chat/async stream": later_in_a_stream,
        "completion": litellm.text_completion(**text).choices[0].text,
        "completion/stream": "".join(c.choices[0].text or "" for c in litellm.text_completion(**text, stream=True)),
        "chat usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "chat usage/stream": [last.usage.prompt_tokens, last.usage.completion_tokens],
        "unknown model": answer(lambda: litellm.completion(**{**chat, "model": "openai/no"})),
        "long prompt": answer(lambda: litellm.text_completion(**{**text, "prompt": question.long_prompt})),
    }


def said(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


if __name__ == "__main__":
    Question.answer_with(ask)
