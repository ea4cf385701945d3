"""smolagents' model for servers like OpenAI's.

Its tool calls are required, and its agents write results of tools into messages of the user, so none is sent here.
"""

import json
from typing import ClassVar

from question import WEATHER, Place, Question, answer
from smolagents import ChatMessage, MessageRole, OpenAIModel, Tool
from smolagents.models import agglomerate_stream_deltas


class Weather(Tool):
    name = WEATHER["name"]
    description = WEATHER["description"]
    inputs: ClassVar = {"city": {"type": "string", "description": "its name"}}
    output_type = "string"

    def forward(self, city: str) -> str:
        return city


def ask(question: Question) -> dict[str, object]:
    def model(name: str, tokens: int) -> OpenAIModel:
        return OpenAIModel(
            name,
            api_base=question.url,
            api_key=question.key,
            temperature=0,
            max_tokens=tokens,
            client_kwargs={"max_retries": 0},
        )

    talker, caller = model(question.model, question.tokens), model(question.model, 120)
    user, turns = message(question.prompt), message(question.weather)
    whole = talker.generate(user)
    deltas = list(talker.generate_stream(user))
    tools = {"tools_to_call_from": [Weather()], "parallel_tool_calls": False}
    streamed = agglomerate_stream_deltas(list(caller.generate_stream(turns, **tools)))
    json_schema = {"name": "place", "schema": Place.model_json_schema()}
    place = caller.generate(user, response_format={"type": "json_schema", "json_schema": json_schema})
    return {
        "chat": whole.content,
        "chat/stream": "".join(delta.content or "" for delta in deltas),
        "chat usage": usage(whole),
        "chat usage/stream": usage(deltas[-1]),
        "tools": calls(caller.generate(turns, **tools)),
        "tools/stream": calls(streamed),
        "structured": Place.model_validate_json(place.content).city,
        "unknown model": answer(lambda: model("no", question.tokens).generate(user)),
        "long prompt": answer(lambda: talker.generate(message(question.long_prompt))),
    }


def message(text: str) -> list[ChatMessage]:
    return [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": text}])]


def calls(called: ChatMessage) -> list[list[object]]:
    found = [call.function for call in called.tool_calls]
    return [[f.name, json.loads(f.arguments) if isinstance(f.arguments, str) else f.arguments] for f in found]


def usage(answered: ChatMessage) -> list[int]:
    return [answered.token_usage.input_tokens, answered.token_usage.output_tokens]


if __name__ == "__main__":
    Question.answer_with(ask)
