"""LangChain's OpenAI models: chats and completions."""

from typing import Any

from langchain_chats import ask_chat
from langchain_openai import ChatOpenAI, OpenAI
from question import Question


def ask(question: Question) -> dict[str, object]:
    server: dict[str, Any] = {"base_url": question.url, "api_key": question.key, "temperature": 0, "max_retries": 0}

    def model(name: str, tokens: int) -> ChatOpenAI:
        return ChatOpenAI(**server, model=name, max_tokens=tokens, stream_usage=True)

    completion = OpenAI(**server, model=question.model, max_tokens=question.tokens)
    return {
        **ask_chat(question, model),
        "completion": completion.invoke(question.prompt),
        "completion/stream": "".join(completion.stream(question.prompt)),
    }


if __name__ == "__main__":
    Question.answer_with(ask)
