"""LangChain's OpenAI model with the API of responses."""

from langchain_chats import ask_chat
from langchain_openai import ChatOpenAI
from question import Question


def ask(question: Question) -> dict[str, object]:
    def model(name: str, tokens: int) -> ChatOpenAI:
        return ChatOpenAI(
            base_url=question.url,
            api_key=question.key,
            model=name,
            temperature=0,
            max_tokens=tokens,
            max_retries=0,
            use_responses_api=True,
        )

    return ask_chat(question, model)


if __name__ == "__main__":
    Question.answer_with(ask)
