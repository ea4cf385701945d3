"""Requests with the fields and types that coding agents send are accepted, in the first and in a later turn.

The requests have the form of those of Codex 0.171, Claude Code 2.1.197, opencode 1.18.33, Qwen Code 0.15.10 and aider
0.86.2; their texts are others.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from support.server_process import Server
from support.waiting import LONGEST

pytestmark = pytest.mark.slow

SYSTEM, TASK, COMMAND = "Use the tools.", "Write a file.", "echo hello > hello.txt"
JSON_SCHEMA = "https://json-schema.org/draft/2020-12/schema"
SHELL: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "a command"}},
    "required": ["command"],
}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
WHOLE_NUMBERS = {"minimum": -9007199254740991, "exclusiveMinimum": 0, "type": "integer", "maximum": 9007199254740991}


def function(name: str, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Runs it.", "parameters": SHELL | schema}}


def called(name: str, content: str | None) -> dict[str, Any]:
    call = {"name": name, "arguments": json.dumps({"command": COMMAND})}
    return {"role": "assistant", "content": content, "tool_calls": [{"id": "c1", "type": "function", "function": call}]}


def codex(later: bool) -> dict[str, Any]:
    def message(id: str, role: str, *texts: str) -> dict[str, Any]:
        parts = [{"type": "input_text", "text": text} for text in texts]
        return {"type": "message", "id": id, "role": role, "content": parts}

    items = [
        message("msg_1", "developer", SYSTEM),
        message("msg_2", "developer", "Skills", "Permissions"),
        message("msg_3", "user", "<environment_context>"),
        message("msg_4", "user", TASK),
    ]
    arguments = json.dumps({"cmd": COMMAND})
    turn = [
        {
            "type": "function_call",
            "status": "completed",
            "id": "fc_1",
            "name": "exec_command",
            "arguments": arguments,
            "call_id": "c1",
        },
        {"type": "function_call_output", "id": "fco_1", "call_id": "c1", "output": "Chunk ID: 1\nOutput:\n"},
    ]
    execute = {
        "type": "object",
        "properties": {
            "cmd": {"type": "string"},
            "login": {"type": "boolean"},
            "prefix_rule": {"type": "array", "items": {"type": "string"}},
            "sandbox_permissions": {"type": "string", "enum": ["use_default", "require_escalated"]},
            "yield_time_ms": {"type": "number"},
        },
        "required": ["cmd"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "name": "exec_command", "description": "Runs it.", "strict": False}
    spawn = tool | {"name": "spawn_agent", "parameters": SHELL}
    namespace = {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [spawn]}
    return {
        "model": "quire-demo",
        "stream": True,
        "input": items + turn * later,
        "tools": [tool | {"parameters": execute}, namespace, {"type": "web_search"}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        "client_metadata": {"turn_id": "1"},
        "max_output_tokens": 8,
    }


def claude_code(later: bool) -> dict[str, Any]:
    def text(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}

    call = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": COMMAND}}
    result = {"tool_use_id": "c1", "type": "tool_result", "content": "done", "is_error": False, **EPHEMERAL}
    turn = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    schema = {"$schema": JSON_SCHEMA, **SHELL, "additionalProperties": False}
    return {
        "model": "quire-demo",
        "max_tokens": 8,
        "stream": True,
        "messages": [{"role": "user", "content": [text("<system-reminder>"), text(TASK)]}, *(turn * later)],
        "system": [text("x-anthropic-billing-header: cc_version=2;"), text(SYSTEM) | EPHEMERAL],
        "tools": [{"name": "Bash", "description": "Runs it.", "input_schema": schema}],
        "metadata": {"user_id": "user"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }


def opencode(later: bool) -> dict[str, Any]:
    turn = [called("bash", ""), {"role": "tool", "tool_call_id": "c1", "content": "(no output)"}]
    properties = SHELL["properties"] | {"timeout": WHOLE_NUMBERS | {"description": "milliseconds"}}
    return {
        "model": "quire-demo",
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}, *(turn * later)],
        "tools": [function("bash", **{"$schema": JSON_SCHEMA}, properties=properties)],
        "tool_choice": "auto",
    }


def qwen_code(later: bool) -> dict[str, Any]:
    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": text}]}

    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Output: (empty)"}]}
    greeting = [user("This is the context."), {"role": "assistant", "content": "Thanks."}]
    turn = [called("run_shell_command", None), result]
    return {
        "model": "quire-demo",
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "system", "content": SYSTEM}, *greeting, user(TASK), *(turn * later)],
        "tools": [function("run_shell_command"), function("read_file")],
    }


def aider(later: bool) -> dict[str, Any]:
    """Its examples are turns of the conversation."""
    examples = [{"role": "user", "content": "Change it."}, {"role": "assistant", "content": "Ok."}] * (1 + later)
    messages = [{"role": "system", "content": SYSTEM}, *examples, {"role": "user", "content": TASK}]
    return {"model": "quire-demo", "messages": messages, "stream": True, "temperature": 0, "max_tokens": 8}


AGENTS = {
    codex: ("/v1/responses", "response.incomplete"),
    claude_code: ("/v1/messages?beta=true", "message_stop"),
    opencode: ("/v1/chat/completions", "[DONE]"),
    qwen_code: ("/v1/chat/completions", "[DONE]"),
    aider: ("/v1/chat/completions", "[DONE]"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = "--dtype float32 --kv-cache-memory-bytes 256M --response-store memory --tool-strict-level parameter"
    with Server(*options.split()) as server:
        yield server


@pytest.mark.parametrize("later", [False, True], ids=["first turn", "later turn"])
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
def test_requests_of_agents_are_answered(server, agent, later):
    path, end = AGENTS[agent]
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    request = urllib.request.Request(server.url + path, json.dumps(agent(later)).encode(), headers)
    with urllib.request.urlopen(request, timeout=LONGEST) as response:
        events = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: ")]
    if end == "[DONE]":
        assert events.pop() == end
        chunks = [json.loads(event) for event in events]
        assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] in ("length", "stop")
        assert bool(chunks[-1].get("usage")) == ("stream_options" in agent(later))
    else:
        assert json.loads(events[-1])["type"] in (end, "response.completed")
