"""LangChain's models for Ollama's API."""

from langchain_chats import ask_chat
from langchain_ollama import ChatOllama, OllamaLLM
from question import Question


def ask(question: Question) -> dict[str, object]:
    server = {"base_url": question.host, "client_kwargs": {"headers": {"x-api-key": question.key}}, "temperature": 0}

    def model(name: str, tokens: int) -> ChatOllama:
        return ChatOllama(**server, model=name, num_predict=tokens)

    generation = OllamaLLM(**server, model=question.model, num_predict=question.tokens)
    return {
        **ask_chat(question, model),
        "chat/generate": generation.invoke(question.prompt),
        "chat/generate stream": "".join(generation.stream(question.prompt)),
    }


if __name__ == "__main__":
    Question.answer_with(ask)
