"""What the tests of faults ask a server."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil

from support.server import Answer, request
from support.server_process import Server

SMALL = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", "32M")
PROMPT = "Once upon a time"
PROMPTS = [f"Once upon a time there were {number} little" for number in range(8)]


def post(server: Server, path: str, body: Any) -> Answer:
    return request(server.url, "POST", path, json.dumps(body).encode(), Content_Type="application/json")


def completion(server: Server, prompt: str = PROMPT, tokens: int = 20, stream: bool = False) -> str:
    """The text of a greedy completion."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    answer = post(server, "/v1/completions", body)
    assert answer.status == 200, answer.body
    if not stream:
        return str(answer.json["choices"][0]["text"])
    *events, end = [line for line in answer.body.decode().splitlines() if line.startswith("data: ")]
    assert end == "data: [DONE]"
    return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events)


def streams(server: Server, pool: ThreadPoolExecutor, tokens: int = 400) -> list[Future[str]]:
    """Streams of all PROMPTS, which have begun when one has."""
    return [pool.submit(completion, server, prompt, tokens, stream=True) for prompt in PROMPTS]


def grammar_seconds(seconds: int) -> tuple[str, ...]:
    """Arguments of a server that gives a grammar this time. The default is short for a busy machine."""
    return ("--structured-outputs-config", json.dumps({"total_seconds": seconds}))


def schema_request(server: Server, name: str) -> Answer:
    """A request whose grammar a process of the untrusted pool compiles. Each name is a new grammar."""
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    messages = [{"role": "user", "content": "A number, please."}]
    return post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 40, "response_format": form})


def processes(server: Server, part: str) -> list[psutil.Process]:
    """The processes of a server whose command line has this part, in the order of their start."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    found = [process for process in family if part in " ".join(process.cmdline())]
    return sorted(found, key=lambda process: process.create_time())


def has_torch(process: psutil.Process) -> bool:
    """Whether it is a core or a rank, and not an API process."""
    return any("libtorch_cpu" in mapped.path for mapped in process.memory_maps())
