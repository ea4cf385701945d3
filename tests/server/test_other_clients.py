"""The clients of other APIs, in an environment of their own, against a live server."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from support.client_environment import ENVIRONMENTS, clients_python, run_client
from support.server import Host, Service
from support.waiting import LONGEST

pytestmark = pytest.mark.slow

QUESTION = "Tell me a story about a dog."
WEATHER = "What is the weather in Paris?"
KEY = "secret"

ANTHROPIC = """
import json, sys
from anthropic import Anthropic, APIStatusError, AsyncAnthropic
import asyncio

url, question, weather, key = sys.argv[1:]
client = Anthropic(base_url=url, api_key=key, max_retries=0)
body = dict(model="demo", max_tokens=24, system="Be brief.", messages=[{"role": "user", "content": question}],
            extra_body={"temperature": 0})
whole = client.messages.create(**body)
with client.messages.stream(**body) as stream:
    pieces = list(stream.text_stream)
    streamed = stream.get_final_message()

async def asynchronously():
    async with AsyncAnthropic(base_url=url, api_key=key) as other:
        return await other.messages.create(**body)

schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"name": "get_weather", "description": "Get the weather of a city.", "input_schema": schema}
turns = [{"role": "user", "content": weather}]
call = dict(model="demo", max_tokens=120, tools=[tool], extra_body={"temperature": 0})
with client.messages.stream(messages=turns, **call) as stream:
    called = stream.get_final_message()
result = {"type": "tool_result", "tool_use_id": called.content[0].id, "content": '{"temperature": 21, "sky": "sunny"}'}
turns += [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
told = client.messages.create(messages=turns, **call)

counted = client.messages.count_tokens(**{name: body[name] for name in ("model", "system", "messages")})
try:
    client.messages.create(**{**body, "max_tokens": 0})
except APIStatusError as error:
    refused = [type(error).__name__, error.status_code, error.body["error"]["type"]]
print(json.dumps({
    "texts": [whole.content[0].text, streamed.content[0].text, "".join(pieces),
              asyncio.run(asynchronously()).content[0].text],
    "reasons": [whole.stop_reason, streamed.stop_reason],
    "counted": [counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens],
    "output": [whole.usage.output_tokens, streamed.usage.output_tokens],
    "refused": refused,
    "called": [called.stop_reason, called.content[0].name, called.content[0].input],
    "told": told.content[0].text,
    "models": [[model.id, model.display_name, model.type] for model in client.models.list()],
    "long": client.messages.create(**{**body, "max_tokens": 8192, "stop_sequences": [" "]}).stop_reason,
    "beta": client.beta.messages.create(**body, betas=["context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}).content[0].text,
}))
"""

OLLAMA = '''
import asyncio, json, sys
from ollama import AsyncClient, Client, ResponseError

url, question, weather = sys.argv[1:]
client = Client(url)

def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: its name
    """
chat = dict(model="demo:latest", messages=[{"role": "user", "content": question}],
            options={"temperature": 0, "num_predict": 24}, keep_alive="5m")
generation = dict(model="demo", prompt=question, options=chat["options"])

async def asynchronously():
    return "".join([part.message.content async for part in await AsyncClient(url).chat(**chat, stream=True)])

whole = client.chat(**chat)
asked = dict(model="demo", messages=[{"role": "user", "content": weather}], tools=[get_weather],
             options={"temperature": 0, "num_predict": 120})
called = client.chat(**asked).message
schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
          "additionalProperties": False}
formatted = json.loads(client.chat(**chat, format=schema).message.content)
streamed = [call for part in client.chat(**asked, stream=True) for call in part.message.tool_calls or ()]
asked["messages"] += [called, {"role": "tool", "tool_name": "get_weather",
                               "content": '{"temperature": 21, "sky": "sunny"}'}]
try:
    client.chat(**{**chat, "model": "unknown"})
except ResponseError as error:
    refused = error.status_code
print(json.dumps({
    "texts": [
        whole.message.content, asyncio.run(asynchronously()),
        "".join(part.message.content for part in client.chat(**chat, stream=True)),
        client.generate(**generation).response,
        "".join(part.response for part in client.generate(**generation, stream=True)),
    ],
    "end": [whole.done, whole.done_reason, whole.eval_count],
    "models": [client.list().models[0].model, client.ps().models[0].model],
    "family": client.show("demo").details.family,
    "refused": refused,
    "called": [[call.function.name, call.function.arguments] for call in [*called.tool_calls, *streamed]],
    "formatted": list(formatted.items()),
    "told": client.chat(**asked).message.content,
}))
'''

OLLAMA_JS = """
import { Ollama } from 'ollama'
const [url, question] = process.argv.slice(2)
const client = new Ollama({ host: url })
const options = { temperature: 0, num_predict: 24 }
const chat = { model: 'demo', messages: [{ role: 'user', content: question }], options }
const generation = { model: 'demo', prompt: question, options }
const texts = [(await client.chat(chat)).message.content, (await client.generate(generation)).response, '', '']
for await (const part of await client.chat({ ...chat, stream: true })) texts[2] += part.message.content
for await (const part of await client.generate({ ...generation, stream: true })) texts[3] += part.response
let refused
try { await client.chat({ ...chat, model: 'unknown' }) } catch (error) { refused = error.status_code }
const models = [(await client.list()).models[0].model, (await client.ps()).models[0].model]
console.log(JSON.stringify({ texts, models, family: (await client.show({ model: 'demo' })).details.family, refused }))
"""


LITELLM = """
import json, os, sys
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices
import litellm

url, question = sys.argv[1:]
texts = []
for route in ("ollama", "ollama_chat"):
    body = dict(model=f"{route}/demo", api_base=url, messages=[{"role": "user", "content": question}], temperature=0,
                max_tokens=24)
    texts.append(litellm.completion(**body).choices[0].message.content)
    chunks = litellm.completion(**body, stream=True)
    texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
print(json.dumps(texts))
"""


def expected(server: Service, system: str | None = None) -> str:
    messages = [{"role": "system", "content": system}] if system else []
    body = {"messages": [*messages, {"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    return server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"]


def test_the_anthropic_package_works(host: Host, server: Service):
    guarded = host.serve(api_key=[KEY])
    python = clients_python()
    result = json.loads(run_client(python, ANTHROPIC, guarded.url, QUESTION, WEATHER, KEY))
    assert result["texts"] == [expected(server, "Be brief.")] * 4
    assert result["reasons"] == ["max_tokens"] * 2
    assert result["counted"][0] == result["counted"][1]
    assert result["output"] == [24, 24]
    assert result["refused"] == ["BadRequestError", 400, "invalid_request_error"]
    assert result["called"] == ["tool_use", "get_weather", {"city": "Paris"}]
    assert "sunny" in result["told"]
    assert result["models"] == [["demo", "demo", "model"]]
    assert result["long"] == "stop_sequence"
    assert result["beta"] == expected(server, "Be brief.")


def check_ollama(result, server: Service) -> None:
    assert set(result["texts"]) == {expected(server)}
    assert result["models"] == ["demo:latest"] * 2
    assert result["family"] == "qwen3"
    assert result["refused"] == 404


def test_the_ollama_package_for_python_works(server: Service):
    result = json.loads(run_client(clients_python(), OLLAMA, server.url, QUESTION, WEATHER))
    assert result["formatted"] in ([["city", "Paris"]], [["city", "Rome"]])
    assert result["end"] == [True, "length", 24]
    assert result["called"] == [["get_weather", {"city": "Paris"}]] * 2
    assert "sunny" in result["told"]
    check_ollama(result, server)


def test_litellm_asks_as_it_asks_ollama(server: Service):
    """Its routes for Ollama declare no content type."""
    texts = json.loads(run_client(clients_python(), LITELLM, server.url, QUESTION).splitlines()[-1])
    assert texts[2:] == [expected(server)] * 2
    assert all(texts)


def test_the_ollama_package_for_javascript_works(server: Service):
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    directory = ENVIRONMENTS / "ollama-js"
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "node_modules" / "ollama").is_dir():
        install = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(directory), "ollama@0.6"]
        try:
            subprocess.run(install, check=True, capture_output=True, text=True, timeout=LONGEST)
        except subprocess.SubprocessError as error:
            pytest.skip(f"ollama cannot be installed: {(getattr(error, 'stderr', None) or str(error))[-200:]}")
    script = directory / "client.mjs"
    script.write_text(OLLAMA_JS)
    process = subprocess.run(
        [node, script, server.url, QUESTION], capture_output=True, text=True, timeout=LONGEST, check=False
    )
    assert process.returncode == 0, process.stderr
    check_ollama(json.loads(process.stdout), server)
