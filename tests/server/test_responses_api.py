"""/v1/responses with OpenAI's client: what is answered, streamed, stored, continued, cancelled and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from quire.parsing.events import Content, Reasoning, ToolArguments, ToolCall
from quire.server.response_items import ResponsesRequest
from quire.server.response_output import Events, Output
from quire.server.response_store import ResponseStore
from quire.server.running_chat import Answer, FunctionCall
from support.client_environment import clients_python, run_client
from support.postgres import running_postgres
from support.server import Host, Service, eventually
from support.server_process import Server

GREEDY = {"model": "demo", "temperature": 0.0, "max_output_tokens": 16}
STREAM_EVENT: TypeAdapter = TypeAdapter(ResponseStreamEvent)
LONG = {**GREEDY, "max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}
UNKNOWN = "resp_" + "0" * 48


@pytest.fixture(scope="module")
def service(host: Host) -> Service:
    return host.serve(response_store="memory")


def client_of(service: Service, key: str = "key") -> OpenAI:
    return OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(service: Service) -> OpenAI:
    return client_of(service)


def events_of(stream: bytes) -> list[dict]:
    """The events of a stream, each of which must be as OpenAI's types say, and numbered."""
    blocks = stream.decode().removesuffix("\n\n").split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        STREAM_EVENT.validate_python(events[-1])
    return events


def chat(service: Service, messages: list[dict]) -> str:
    answer = service.post("/v1/chat/completions", {"messages": messages, "temperature": 0, "max_tokens": 16})
    return answer.json["choices"][0]["message"]["content"]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def test_a_response_says_what_a_chat_says(service, client):
    response = client.responses.create(input="Tell me a story.", **GREEDY)
    assert response.output_text == chat(service, [user("Tell me a story.")])
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 16
    assert response.usage.total_tokens == response.usage.input_tokens + 16
    Response.model_validate(response.to_dict())
    whole = client.responses.create(input="Hello!", **{**GREEDY, "max_output_tokens": 200})
    assert whole.status == "completed"
    assert whole.output[0].status == "completed"
    assert whole.completed_at >= whole.created_at


def test_a_stream_has_the_events_of_openais_and_ends_with_the_stored_response(service, client):
    body = {"input": "Tell me a story.", **GREEDY, "stream": True}
    events = events_of(service.post("/v1/responses", body, Authorization="Bearer key").body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 3
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    text = "".join(event["delta"] for event in events if "delta" in event)
    assert text == events[-4]["text"] == chat(service, [user("Tell me a story.")])
    last = events[-1]["response"]
    assert client.responses.retrieve(last["id"]).to_dict() == Response.model_validate(last).to_dict()


def test_the_clients_stream_helper_gathers_the_response(client):
    with client.responses.stream(input="Hello!", **{**GREEDY, "max_output_tokens": 200}) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text
    assert final.status == "completed"


def test_a_response_continues_an_earlier_one_with_new_instructions(service, client):
    first = client.responses.create(input="My name is Ada.", instructions="Be brief.", **GREEDY)
    second = client.responses.create(input="Tell me a story.", previous_response_id=first.id, **GREEDY)
    third = client.responses.create(
        input=[user("And then?")], previous_response_id=second.id, instructions="Be kind.", **GREEDY
    )
    conversation = [
        *(user("My name is Ada."), {"role": "assistant", "content": first.output_text}),
        *(user("Tell me a story."), {"role": "assistant", "content": second.output_text}),
        user("And then?"),
    ]
    system = {"role": "system", "content": "Be kind."}
    assert second.output_text == chat(service, conversation[:3])
    assert third.output_text == chat(service, [system, *conversation])
    assert third.previous_response_id == second.id


def test_the_input_of_a_response_is_listed_in_pages(client):
    first = client.responses.create(input="One", **GREEDY)
    second = client.responses.create(
        input=[user("Two"), {"role": "assistant", "content": "2"}, user("Three")],
        previous_response_id=first.id,
        **GREEDY,
    )
    listed = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.content[0].text for item in listed] == ["One", first.output_text, "Two", "2", "Three"]
    newest_first = client.responses.input_items.list(second.id, limit=2)
    assert [item.id for item in newest_first.data] == [listed[4].id, listed[3].id]
    assert newest_first.has_more
    assert [item.id for item in newest_first] == [item.id for item in reversed(listed)]  # the client asks for more
    with pytest.raises(openai.BadRequestError, match="after"):
        client.responses.input_items.list(second.id, after="msg_unknown")


def test_nobody_but_the_holder_of_its_key_finds_a_response(host):
    service = host.serve(response_store="memory", api_key=["one", "two"])
    owner, other = client_of(service, "one"), client_of(service, "two")
    response = owner.responses.create(input="Hello!", **GREEDY)
    for attempt in (
        lambda: other.responses.retrieve(response.id),
        lambda: other.responses.retrieve(response.id, stream=True),
        lambda: other.responses.delete(response.id),
        lambda: other.responses.cancel(response.id),
        lambda: other.responses.input_items.list(response.id),
        lambda: other.responses.create(input="More", previous_response_id=response.id, **GREEDY),
    ):
        with pytest.raises(openai.NotFoundError, match="no response has the id"):
            attempt()
    running = owner.responses.create(input="Hello!", background=True, **LONG)
    for attempt in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
        with pytest.raises(openai.NotFoundError):
            attempt(running.id)
    assert owner.responses.cancel(running.id).status == "cancelled"
    assert owner.responses.retrieve(response.id).output_text == response.output_text
    store = service.app.state.responses.store
    stored = store.call(store._execute, "SELECT owner FROM quire_responses").fetchall()
    assert stored
    assert not any("one" in row[0] for row in stored)


def test_a_response_that_is_not_to_be_stored_is_not(service, client):
    response = client.responses.create(input="Hello!", store=False, **GREEDY)
    assert response.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(input="More", previous_response_id=response.id, **GREEDY)
    assert caught.value.param == "previous_response_id"


def test_a_deleted_response_can_neither_be_read_nor_continued(service, client):
    first = client.responses.create(input="Hello!", **GREEDY)
    second = client.responses.create(input="More", previous_response_id=first.id, **GREEDY)
    assert service.request("DELETE", f"/v1/responses/{first.id}", Authorization="Bearer key").json == {
        "id": first.id,
        "object": "response",
        "deleted": True,
    }
    for method in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            method(first.id)
    assert client.responses.retrieve(second.id).output_text == second.output_text
    with pytest.raises(openai.NotFoundError, match=f"{first.id} is not stored any more"):
        client.responses.create(input="Even more", previous_response_id=second.id, **GREEDY)


def test_a_stored_response_is_streamed_again(service, client):
    response = client.responses.create(input="Hello!", **GREEDY)
    path = f"/v1/responses/{response.id}?stream=true"
    events = events_of(service.get(path, Authorization="Bearer key").body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if "delta" in event) == response.output_text
    assert events[-1]["response"]["output"] == response.to_dict()["output"]
    later = events_of(service.get(f"{path}&starting_after=3", Authorization="Bearer key").body)
    assert later == events[4:]
    assert events_of(service.get(f"{path}&starting_after=900", Authorization="Bearer key").body) == events[-1:]


def test_a_background_response_is_generated_while_its_client_is_away(service, client):
    begun = client.responses.create(input="Hello!", background=True, **{**GREEDY, "max_output_tokens": 200})
    assert (begun.status, begun.output) == ("queued", [])
    eventually(lambda: client.responses.retrieve(begun.id).status == "completed")
    done = client.responses.retrieve(begun.id)
    assert (
        done.output_text == client.responses.create(input="Hello!", **{**GREEDY, "max_output_tokens": 200}).output_text
    )
    assert not service.app.state.responses.runs
    with pytest.raises(openai.BadRequestError, match="is completed already"):
        client.responses.cancel(begun.id)


def test_a_background_response_can_be_followed_from_any_event_and_cancelled(service, client, host):
    seen = []
    for event in client.responses.create(input="Tell me a story.", background=True, stream=True, **LONG):
        seen.append(event)
        if len(seen) == 8:
            break  # the connection is closed
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    response_id = seen[0].response.id
    assert client.responses.retrieve(response_id).status == "in_progress"
    followed = []
    for event in client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number):
        followed.append(event)
        if len(followed) == 5:
            assert client.responses.cancel(response_id).status == "cancelled"
    assert [event.sequence_number for event in followed] == list(range(8, 8 + len(followed)))
    assert (followed[-1].type, followed[-1].response.status) == ("response.incomplete", "cancelled")
    assert client.responses.retrieve(response_id).to_dict() == followed[-1].response.to_dict()
    assert client.responses.cancel(response_id).status == "cancelled"
    eventually(lambda: host.is_idle)


def test_a_background_response_that_is_deleted_ends(service, client, host):
    running = client.responses.create(input="Tell me a story.", background=True, **LONG)
    client.responses.delete(running.id)
    eventually(lambda: host.is_idle and not service.app.state.responses.runs)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(running.id)


@pytest.mark.nightly
def test_another_server_with_the_same_store_cancels_a_background_response(host, tmp_path):
    path = str(tmp_path / "responses.sqlite3")
    here, there = host.serve(response_store=path), host.serve(response_store=path)
    running = client_of(here).responses.create(input="Tell me a story.", background=True, **LONG)
    assert client_of(there).responses.retrieve(running.id).status == "queued"
    assert client_of(there).responses.cancel(running.id).status == "cancelled"
    eventually(lambda: not here.app.state.responses.runs)
    assert client_of(here).responses.retrieve(running.id).status == "cancelled"


def test_a_response_whose_server_has_ended_has_failed(host, tmp_path):
    path = tmp_path / "responses.sqlite3"
    service = host.serve(response_store=str(path))
    response = client_of(service).responses.create(input="Hello!", background=True, **GREEDY)
    store: ResponseStore = service.app.state.responses.store
    eventually(lambda: not service.app.state.responses.runs)
    for status in ("completed", "incomplete"):
        store.call(store._execute, f"""UPDATE quire_responses SET record = replace(record, '"{status}"', '"queued"')""")
    assert client_of(service).responses.retrieve(response.id).status == "queued"
    store.call(store._execute, "UPDATE quire_responses SET used = used - 100")
    lost = client_of(service).responses.retrieve(response.id)
    assert (lost.status, lost.error.code) == ("failed", "server_error")


def test_logprobs_are_those_of_a_chat(service, client):
    body = {"messages": [user("Hello!")], "temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    expected = service.post("/v1/chat/completions", body).json["choices"][0]["logprobs"]["content"]
    asked = {**GREEDY, "max_output_tokens": 5, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = client.responses.create(input="Hello!", **asked)
    assert response.to_dict()["output"][0]["content"][0]["logprobs"] == expected
    deltas = [e for e in client.responses.create(input="Hello!", stream=True, **asked) if "text.delta" in e.type]
    assert [entry.to_dict() for event in deltas for entry in event.logprobs] == expected


def test_parameters_come_back_with_the_response(client):
    given = {
        "metadata": {"a": "b"},
        "instructions": "Be brief.",
        "top_p": 0.5,
        "truncation": "auto",
        "user": "Ada",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
    }
    response = client.responses.create(input="Hello!", **GREEDY, **given).to_dict()
    assert {name: response[name] for name in given} == given
    assert (response["temperature"], response["max_output_tokens"], response["model"]) == (0.0, 16, "demo")


def test_vllms_sampling_parameters_can_be_sent(service, client):
    word = client.responses.create(input="Hello!", extra_body={"stop": [" "], "seed": 1}, **GREEDY).output_text
    assert " " not in word
    body = {"input": "Hello!", "temperature": 0, "max_output_tokens": 4, "logit_bias": {"65": 100}}
    assert set(service.post("/v1/responses", body).json["output"][0]["content"][0]["text"]) == {
        service.post("/detokenize", {"tokens": [65]}).json["prompt"]
    }


def test_a_long_input_is_truncated_if_it_may_be(service, client):
    long = "word " * 5000
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input=long, **GREEDY)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    assert client.responses.create(input=long, truncation="auto", **GREEDY).output_text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}, {"type": "item_reference", "id": "x"}]}, "input[1]"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"n": 2, "temperature": 1}, "n"),
        ({"messages": [user("Hello!")]}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ({"truncation": "middle"}, "truncation"),
        ({"tools": [{"type": 5}]}, "tools[0]"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "xml"}}]}, "tools[0].format.type"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}}, "text.format.schema"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"previous_response_id": 5}, "previous_response_id"),
    ],
)
def test_a_wrong_field_is_named(service, fields, param):
    answer = service.post("/v1/responses", {"input": "Hello!", **fields})
    assert answer.status == 400
    assert answer.error["param"] == param, answer.error


def test_wrong_addresses_are_refused(service):
    assert service.get("/v1/responses/resp_1").error["code"] == "response_not_found"
    for path in (UNKNOWN, f"{UNKNOWN}/input_items", "%00", "a'--"):
        assert service.get(f"/v1/responses/{path}").status == 404
    for query in ("limit=0", "limit=101", "limit=x", "order=up"):
        answer = service.get(f"/v1/responses/{UNKNOWN}/input_items?{query}")
        assert (answer.status, answer.error["param"]) == (400, query.split("=")[0])
    answer = service.post("/v1/responses", {"input": "x", "previous_response_id": "resp_\0"})
    assert (answer.status, answer.error["param"]) == (404, "previous_response_id")


def test_only_background_responses_can_be_cancelled(client):
    response = client.responses.create(input="Hello!", **GREEDY)
    with pytest.raises(openai.BadRequestError, match="not generated in the background"):
        client.responses.cancel(response.id)


def test_a_full_store_keeps_the_latest_and_a_response_that_does_not_fit_is_answered(host):
    service = host.serve(response_store="memory", response_store_bytes=8000)
    client = client_of(service)
    ids = [client.responses.create(input="Hello! " * 200, **GREEDY).id for _ in range(4)]
    assert client.responses.retrieve(ids[-1]).id == ids[-1]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ids[0])
    large = client.responses.create(input=[user("Hello!"), user("x " * 5000)], truncation="auto", **GREEDY)
    assert large.output_text
    assert large.to_dict()["store"] is False
    assert client.responses.retrieve(ids[-1])


def test_a_stream_that_fails_ends_with_a_failed_response(host, caplog):
    body = {"input": "Tell me a story.", "max_output_tokens": 1500, "ignore_eos": True}
    answer = host.post_until_time_is_up("/v1/responses", body, response_store="memory")
    events = events_of(answer.body)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"].startswith("the request was not finished within")
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    said = f"request {answer.headers['x-request-id']}: the answer ended with error 504, the request was not finished"
    eventually(lambda: said in caplog.text)


WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION = "What is the weather in Paris?"


def answers_of(client: OpenAI, stream: bool, **fields) -> Response:
    """The response, whole or gathered from its stream."""
    fields = {**GREEDY, "max_output_tokens": 120, **fields}
    if not stream:
        return client.responses.create(**fields)
    with client.responses.stream(**fields) as events:
        return events.get_final_response()


STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@STREAMS
def test_the_bundled_model_calls_a_tool_and_reads_its_result(client, stream):
    called = answers_of(client, stream, input=QUESTION, tools=[WEATHER])
    [call] = called.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Paris"})
    assert called.status == call.status == "completed"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 21, "sky": "sunny"}'}
    continued = answers_of(client, stream, input=[result], previous_response_id=called.id, tools=[WEATHER])
    assert continued.output_text
    # A client without a store sends the items back.
    items = [user(QUESTION), call.to_dict(), result]
    again = answers_of(client, stream, input=items, tools=[WEATHER], store=False)
    assert again.output_text == continued.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [{**WEATHER, "parameters": {"type": "nonsense"}}], "tool_choice": "required"}, "tools"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nonsense"}}}}, "text.format"),
    ],
)
def test_impossible_tools_and_schemas_are_refused(service, fields, param):
    for stream in (False, True):
        answer = service.post("/v1/responses", {"input": QUESTION, "stream": stream, **fields})
        assert (answer.status, answer.error["param"]) == (400, param), answer.body


@STREAMS
def test_thinking_is_an_item_of_its_own_that_can_be_sent_back(parrot, stream):
    client = client_of(parrot)
    text = "<think>\nIt is a city.\n</think>\n\nIt rains."
    response = answers_of(client, stream, input=text)
    thought, answer = response.output
    assert thought.content[0].text.strip() == "It is a city."
    assert (thought.type, thought.summary, answer.type) == ("reasoning", [], "message")
    assert response.output_text.strip() == "It rains."
    assert 3 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens - 3
    items = [user(text), *(item.to_dict() for item in response.output), user("More.")]
    stateless = answers_of(client, stream, input=items, store=False)
    continued = answers_of(client, stream, input="More.", previous_response_id=response.id)
    assert stateless.output_text == continued.output_text
    assert stateless.usage.input_tokens == continued.usage.input_tokens


@STREAMS
def test_a_call_ends_thinking_without_an_end_marker(parrot, stream):
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    text = '<think>A tool.<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    thought, call = answers_of(client_of(parrot), stream, input=text, tools=[tool]).output
    assert (thought.type, thought.content[0].text) == ("reasoning", "A tool.")
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Paris"}')


AGENTS = """
import asyncio, json, sys
from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI

url, question = sys.argv[1:]
set_tracing_disabled(True)
set_default_openai_client(AsyncOpenAI(base_url=url + "/v1", api_key="key"))
cities = []

@function_tool
def get_weather(city: str) -> str:
    "Get the weather of a city."
    cities.append(city)
    return '{"temperature": 21, "sky": "sunny"}'

async def main():
    agent = Agent(name="agent", model="demo", tools=[get_weather], model_settings=ModelSettings(temperature=0))
    whole = await Runner.run(agent, question)
    streamed = Runner.run_streamed(agent, question)
    async for event in streamed.stream_events():
        pass
    continued = await Runner.run(agent, question, previous_response_id=whole.last_response_id)
    return [whole.final_output, streamed.final_output, continued.final_output]

print(json.dumps({"texts": asyncio.run(main()), "cities": cities}))
"""


@pytest.mark.slow
def test_the_package_openai_agents_works(service):
    result = json.loads(run_client(clients_python(), AGENTS, service.url, QUESTION))
    assert result["cities"][:2] == ["Paris", "Paris"]
    assert result["texts"][0] == result["texts"][1]
    assert all(result["texts"])


def test_tools_that_are_not_allowed_are_not_called(client):
    other = {**WEATHER, "name": "get_time"}
    asked = {"input": QUESTION, "tools": [WEATHER, other]}
    for choice in (
        {"type": "function", "name": "get_time"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]},
    ):
        response = answers_of(client, False, tool_choice=choice, **asked)
        assert {item.name for item in response.output} == {"get_time"}
        assert response.to_dict()["tool_choice"] == choice
    assert answers_of(client, False, tool_choice="none", **asked).output[0].type == "message"


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@pytest.mark.sampled(2)
@STREAMS
def test_an_answer_is_parsed_into_the_clients_model(client, stream):
    asked = {"input": "Who are you?", "model": "demo", "temperature": 0, "max_output_tokens": 300}
    if stream:
        with client.responses.stream(text_format=Person, **asked) as events:
            parsed = events.get_final_response().output_parsed
    else:
        parsed = client.responses.parse(text_format=Person, **asked).output_parsed
    assert isinstance(parsed, Person)
    answer = client.responses.create(text={"format": {"type": "json_object"}}, **asked)
    assert answer.status != "completed" or isinstance(json.loads(answer.output_text), dict)


def test_items_become_the_messages_of_a_chat():
    call, output = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}, "function_call_output"
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "One"}, {"type": "input_text", "text": "Two"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
        call,
        {**call, "call_id": "b"},
        {"type": output, "call_id": "a", "output": "1"},
        {"type": output, "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    body = ResponsesRequest(input=items, instructions="Be brief.")
    chat = body.chat(body.items())
    calls = [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in "ab"]
    assert [message.model_dump(exclude_unset=True) for message in chat.messages] == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "One\nTwo"},
        {"role": "assistant", "reasoning": "Hm.", "content": "So.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "No."},
    ]


def test_a_conversation_that_is_too_large_is_refused(host):
    service = host.serve(response_store="memory", max_body_bytes=20_000)
    client = client_of(service)
    asked = {"input": "word " * 2000, "truncation": "auto", **GREEDY}
    first = client.responses.create(**asked)
    second = client.responses.create(previous_response_id=first.id, **asked)
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(previous_response_id=second.id, **asked)
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


VLLMS_FIELDS = """background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
    parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature text tool_choice
    tools top_logprobs top_p top_k truncation user skip_special_tokens include_stop_str_in_output prompt_cache_key
    request_id mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages
    previous_response structured_outputs repetition_penalty seed stop ignore_eos vllm_xargs min_p
    spaces_between_special_tokens presence_penalty frequency_penalty prompt_cache_options prompt_cache_retention
    safety_identifier watermarking session_id media_io_kwargs mm_payload return_mm_kwargs stop_token_ids
    kv_transfer_params ec_transfer_params chat_template_kwargs"""


def test_every_field_of_vllms_is_read_or_refused_or_has_no_effect():
    for name in VLLMS_FIELDS.split():
        if name not in ResponsesRequest.model_fields:
            body = ResponsesRequest.model_validate({"input": "Hello!", name: [{"a": 1}]})
            refused = body.unsupported()
            assert not body.unknown() if refused is None else refused[0] == name


def test_an_unknown_field_is_ignored_and_logged_once(service, caplog):
    for _ in range(2):
        body = {"input": "Hello!", "max_output_tokens": 1, "unheard_of": 1, "service_tier": "auto"}
        assert service.post("/v1/responses", body).status == 200
    assert caplog.text.count("Ignored a field that is not known: 'unheard_of'") == 1
    assert "service_tier" not in caplog.text


def test_every_kind_of_item_is_streamed_as_openais_types_say():
    events = Events()
    output = Output(events)
    answer = Answer(0, tool_calls=[FunctionCall("call_a", "f"), FunctionCall("call_b", "g")])
    for event in (
        *(Reasoning("I th"), Reasoning("ink."), Content("So"), Content(" be it.")),
        *(ToolCall(0, "f"), ToolArguments(0, '{"a"'), ToolArguments(0, ": 1}"), ToolCall(1, "g"), Content("Done.")),
    ):
        output.add(event, answer, [])
    output.close()
    kinds = [event["type"].removeprefix("response.") for event in events_of(events.take())]
    reasoning, text = (
        [
            *("output_item.added", "content_part.added", f"{kind}.delta", f"{kind}.delta", f"{kind}.done"),
            *("content_part.done", "output_item.done"),
        ]
        for kind in ("reasoning_text", "output_text")
    )
    arguments = "function_call_arguments"
    assert kinds == [
        *reasoning,
        *text,
        *("output_item.added", f"{arguments}.delta", f"{arguments}.delta", f"{arguments}.done", "output_item.done"),
        *("output_item.added", f"{arguments}.done", "output_item.done"),
        *(text[:3] + text[4:]),
    ]
    summary = [
        (item["type"], item.get("arguments") or item.get("content", [{}])[0].get("text")) for item in output.items
    ]
    assert summary == [
        *(("reasoning", "I think."), ("message", "So be it."), ("function_call", '{"a": 1}')),
        *(("function_call", None), ("message", "Done.")),
    ]
    assert [item.get("call_id") for item in output.items] == [None, None, "call_a", "call_b", None]
    again = Output(Events())
    for item in output.items:
        again.replay(item)
    assert again.items == output.items
    events_of(again._events.take())


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    with running_postgres() as server:
        yield server.url


@pytest.mark.slow
def test_servers_that_share_a_postgres_continue_each_others_responses(host, postgres_url):
    one, two = (client_of(host.serve(response_store=postgres_url)) for _ in range(2))
    first = one.responses.create(input="My name is Ada.", **GREEDY)
    second = two.responses.create(input="Tell me a story.", previous_response_id=first.id, **GREEDY)
    third = one.responses.create(input="And then?", previous_response_id=second.id, **GREEDY)
    assert len(two.responses.input_items.list(third.id).data) == 5
    running = one.responses.create(input="Tell me a story.", background=True, **LONG)
    assert two.responses.cancel(running.id).status == "cancelled"
    two.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        one.responses.retrieve(first.id)


@pytest.mark.slow
def test_answers_go_on_while_a_postgres_is_down(host):
    with running_postgres() as server:
        service = host.serve(response_store=server.url)
        client = client_of(service)
        response = client.responses.create(input="Hello!", **GREEDY)
        server.stop()
        with pytest.raises(openai.InternalServerError) as caught:
            client.responses.retrieve(response.id)
        assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")
        assert client.responses.create(input="Hello!", **GREEDY).to_dict()["store"] is False
        with pytest.raises(openai.InternalServerError):
            client.responses.create(input="Hello!", background=True, **GREEDY)
        server.start()
        assert client.responses.retrieve(response.id).output_text == response.output_text
        assert client.responses.create(input="Hello!", **GREEDY).to_dict()["store"] is True


@pytest.mark.nightly
def test_a_server_that_is_told_to_end_finishes_background_responses_which_the_next_one_has(tmp_path):
    arguments = ("--max-num-seqs", "8", "--response-store", str(tmp_path / "responses.sqlite3"))
    with Server(*arguments) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)
        model = client.models.list().data[0].id
        running = client.responses.create(input="Tell me a story.", background=True, **{**LONG, "model": model})
        assert server.stop() == 0
    with Server(*arguments) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)
        done = client.responses.retrieve(running.id)
        assert (done.status, done.usage.output_tokens) == ("incomplete", 1500), done.error
