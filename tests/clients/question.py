"""What every client is asked, and how it tells what it was answered: JSON on standard input and output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": PARAMETERS}


class Place(BaseModel):
    """Where someone lives."""

    city: Literal["Paris", "Rome"]


@dataclass(frozen=True)
class Question:
    """url: the API's base, with /v1. tokens: the length of the answers. long_prompt: too long for the model.

    weather: asks for what the tool WEATHER returns: sky. greeting: has an answer that is shorter than `tokens`.
    """

    url: str
    key: str
    model: str
    prompt: str
    long_prompt: str
    tokens: int
    weather: str
    sky: str
    greeting: str

    @property
    def host(self) -> str:
        """The server's address, which is the base of Anthropic's and Ollama's API."""
        return self.url.removesuffix("/v1")

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]

    @classmethod
    def answer_with(cls, ask: Callable[[Question], dict[str, object]]) -> None:
        """Read a question from standard input, and print what `ask` makes of it."""
        print(json.dumps(ask(cls(**json.load(sys.stdin)))))


def answer(ask: Callable[[], object]) -> str:
    """The error that a question ends in: its type and text."""
    try:
        return f"no error: {ask()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
