"""LangChain's model for Anthropic's API."""

from langchain_anthropic import ChatAnthropic
from langchain_chats import ask_chat
from question import Question


def ask(question: Question) -> dict[str, object]:
    def model(name: str, tokens: int) -> ChatAnthropic:
        return ChatAnthropic(
            base_url=question.host, api_key=question.key, model=name, temperature=0, max_tokens=tokens, max_retries=0
        )

    return ask_chat(question, model)


if __name__ == "__main__":
    Question.answer_with(ask)
