"""The packages openai, instructor and langchain-openai, in an environment of their own, ask for tool calls and JSON."""

from __future__ import annotations

import json

import pytest

from support.chats import WEATHER
from support.client_environment import clients_python, run_client
from support.server import Service

pytestmark = pytest.mark.slow

QUESTION = "What is the weather in Paris?"
PERSON = """
from typing import Literal
from pydantic import BaseModel, Field

class Person(BaseModel):
    name: Literal["Kit", "Tim", "Max"]
    age: int = Field(ge=0, le=99)
    friendly: bool
"""

OPENAI = """
import json, sys
from openai import BadRequestError, OpenAI

url, question, weather = sys.argv[1:]
client, tools = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0), [json.loads(weather)]
messages = [{"role": "user", "content": question}]
body = dict(model="demo", messages=messages, temperature=0, max_tokens=100)

def calls(completion):
    choice = completion.choices[0]
    found = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    return [choice.finish_reason, choice.message.content or None, found]

def streamed(**fields):
    with client.chat.completions.stream(**body | fields) as stream:
        kinds = {event.type for event in stream}
        return stream.get_final_completion(), kinds

whole = client.chat.completions.create(**body, tools=tools)
stream, kinds = streamed(tools=tools)
named = {"type": "function", "function": {"name": "get_weather"}}
call = whole.choices[0].message.tool_calls[0]
result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "sunny"}'}
after = client.chat.completions.create(
    **body | {"messages": [*messages, whole.choices[0].message, result]}, tools=tools)
required = dict(tools=tools, tool_choice="required", parallel_tool_calls=False)
forced = [client.chat.completions.create(**body, **required), streamed(**required)[0],
          client.chat.completions.create(**body, tools=tools, tool_choice=named),
          streamed(tools=tools, tool_choice=named)[0]]
parsed = [client.chat.completions.parse(**body, response_format=Person), streamed(response_format=Person)[0]]
try:
    client.chat.completions.create(**body, stream=True, response_format={
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "dog"}}})
except BadRequestError as error:
    refused = error.param
print(json.dumps({
    "calls": [calls(whole), calls(stream)],
    "kinds": sorted(kind for kind in kinds if "tool" in kind),
    "after": after.choices[0].message.content,
    "forced": [calls(answer) for answer in forced],
    "people": [type(answer.choices[0].message.parsed).__name__ for answer in parsed],
    "refused": refused,
}))
"""

INSTRUCTOR = """
import json, sys
import instructor
from openai import OpenAI

url = sys.argv[1]
plain = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
body = dict(model="demo", messages=[{"role": "user", "content": "Who is it?"}], max_tokens=100, max_retries=0)
found = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(plain, mode=mode)
    *_, last = client.chat.completions.create_partial(**body, response_model=Person)
    found[mode.name] = [type(client.chat.completions.create(**body, response_model=Person)).__name__, last.age]
print(json.dumps(found))
"""

LANGCHAIN = """
import asyncio, json, sys
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

url, question, weather = sys.argv[1:]
chat = ChatOpenAI(base_url=url + "/v1", api_key="none", model="demo", temperature=0, max_tokens=100, max_retries=0)
tool = json.loads(weather)

def calls(message):
    return [[call["name"], call["args"]] for call in message.tool_calls]

def streamed(model):
    chunks = list(model.stream(question))
    return sum(chunks[1:], chunks[0])

free, must, named = (chat.bind_tools([tool], **choice) for choice in (
    {}, {"tool_choice": "any", "parallel_tool_calls": False}, {"tool_choice": "get_weather"}))
whole = free.invoke(question)
result = ToolMessage('{"temperature": 21, "sky": "sunny"}', tool_call_id=whole.tool_calls[0]["id"])
people = [chat.with_structured_output(Person, method=method) for method in ("json_schema", "function_calling")]
print(json.dumps({
    "free": [calls(whole), calls(streamed(free)), calls(asyncio.run(free.ainvoke(question)))],
    "after": free.invoke([HumanMessage(question), whole, result]).text,
    "forced": [calls(answer) for model in (must, named) for answer in (model.invoke(question), streamed(model))],
    "people": [type(model.invoke("Who is it?")).__name__ for model in people],
}))
"""


@pytest.fixture(scope="module")
def python():
    return clients_python()


def test_openai_calls_tools_and_parses_json(server: Service, python):
    told = json.loads(run_client(python, PERSON + OPENAI, server.url, QUESTION, json.dumps(WEATHER)))
    assert told["calls"] == [["tool_calls", None, [["get_weather", {"city": "Paris"}]]]] * 2
    assert told["kinds"] == ["tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"]
    assert told["after"]
    assert [reason for reason, _, _ in told["forced"]] == ["tool_calls", "tool_calls", "stop", "stop"]
    for _, content, [[name, arguments]] in told["forced"]:
        assert (content, name) == (None, "get_weather")
        assert "city" in arguments
    assert told["people"] == ["Person", "Person"]
    assert told["refused"] == "response_format"


def test_instructor_reads_models_in_each_of_its_modes(server: Service, python):
    told = json.loads(run_client(python, PERSON + INSTRUCTOR, server.url))
    assert [kind for kind, _ in told.values()] == ["Person"] * 3
    assert all(0 <= age <= 99 for _, age in told.values())


def test_langchain_calls_tools_and_reads_models(server: Service, python):
    told = json.loads(run_client(python, PERSON + LANGCHAIN, server.url, QUESTION, json.dumps(WEATHER)))
    assert told["free"] == [[["get_weather", {"city": "Paris"}]]] * 3
    assert told["after"]
    for [[name, arguments]] in told["forced"]:
        assert name == "get_weather"
        assert "city" in arguments
    assert told["people"] == ["Person", "Person"]
