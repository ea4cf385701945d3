"""Instructor, with each of its ways to make OpenAI's, Anthropic's and Ollama's API write JSON."""

from typing import Any

import anthropic
import instructor
import openai
from question import Place, Question

Mode = instructor.Mode


def ask(question: Question) -> dict[str, object]:
    plain = openai.OpenAI(base_url=question.url, api_key=question.key, max_retries=0)
    claude = anthropic.Anthropic(base_url=question.host, api_key=question.key, max_retries=0)
    options: dict[str, Any] = {"model": question.model, "messages": question.messages, "max_tokens": 100}
    modes = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)
    clients = {mode.value: instructor.from_openai(plain, mode=mode) for mode in modes}
    clients["anthropic"] = instructor.from_anthropic(claude, mode=Mode.ANTHROPIC_TOOLS)
    answers: dict[str, object] = {}
    for name, client in clients.items():
        *_, last = client.create_partial(response_model=Place, max_retries=0, **options)
        answers[f"structured/{name}"] = client.create(response_model=Place, max_retries=0, **options).city
        answers[f"structured/{name} stream"] = last.city
    return answers


if __name__ == "__main__":
    Question.answer_with(ask)
