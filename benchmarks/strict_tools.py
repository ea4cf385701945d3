"""Measures the share of a model's tool calls that are usable, with and without strict tools.

    python benchmarks/strict_tools.py --model MODEL --cases FOLDER [--number 100] [--json FILE]

The cases are those of the Berkeley Function Calling Leaderboard, in the folder bfcl_eval/data of the package bfcl-eval
(its wheel is a zip file; the package need not be installed). Each is sent twice, with `strict: false` and with `strict:
true`, at temperature 0 and with tool_choice "auto". Prints for both: how many answers begin a call, how many calls are
valid (a known function, and arguments that fit its schema), how many answers contain exactly the expected calls, and
the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema

FILES = ("simple_python", "multiple", "parallel", "live_simple")
TYPES = {"dict": "object", "float": "number", "double": "number", "tuple": "array", "list": "array", "any": None}
TYPES |= {"HashMap": "object", "long": "integer", "char": "string", "Array": "array", "ArrayList": "array"}

Json = dict[str, Any]


def as_schema(value: Any) -> Any:
    """Convert the leaderboard's types to JSON schema."""
    if isinstance(value, list):
        return [as_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, item in value.items():
        if key == "type" and isinstance(item, str):
            kind = TYPES.get(item, item.lower() if item in ("String", "Boolean") else item)
            if kind is not None:
                found[key] = kind
        elif key not in ("default", "optional", "format"):
            found[key] = as_schema(item)
    return found


def read_cases(folder: Path, number: int) -> list[Json]:
    """Return the first cases of each file, with the expected calls."""
    cases = []
    for name in FILES:
        lines = (folder / f"BFCL_v4_{name}.json").read_text().splitlines()
        answers = map(json.loads, (folder / "possible_answer" / f"BFCL_v4_{name}.json").read_text().splitlines())
        expected = {answer["id"]: answer["ground_truth"] for answer in answers}
        for line in lines[: -(-number // len(FILES))]:
            case = json.loads(line)
            functions = [
                {
                    "name": re.sub(r"[^\w.-]", "_", f["name"]),
                    "description": f["description"],
                    "parameters": as_schema(f["parameters"]),
                }
                for f in case["function"]
            ]
            cases.append({"messages": case["question"][0], "functions": functions, "expected": expected[case["id"]]})
    return cases


def is_valid(call: Json, functions: list[Json]) -> bool:
    schema = next((f["parameters"] for f in functions if f["name"] == call["name"]), None)
    if schema is None:
        return False
    try:
        jsonschema.validate(json.loads(call["arguments"]), schema)
    except (ValueError, jsonschema.ValidationError, jsonschema.SchemaError):
        return False
    return True


def is_expected(calls: list[Json], expected: list[Json]) -> bool:
    """Whether the calls are the expected ones, in any order. Each argument has a list of correct values."""
    if len(calls) != len(expected):
        return False
    rest = list(expected)
    for call in calls:
        arguments = json.loads(call["arguments"])
        found = next((e for e in rest if _matches(call["name"], arguments, e)), None)
        if found is None:
            return False
        rest.remove(found)
    return True


def _matches(name: str, arguments: Json, expected: Json) -> bool:
    ((right, values),) = expected.items()
    if name != right or not arguments.keys() <= values.keys():
        return False
    return all(
        arguments.get(key, "") in options or (key not in arguments and "" in options) for key, options in values.items()
    )


async def ask_all(url: str, cases: list[Json], strict: bool, streams: int) -> Json:
    """Return the counts over all cases, and the seconds that they took."""
    turn = asyncio.Semaphore(streams)
    counts = {"begun": 0, "calls": 0, "valid": 0, "right": 0, "refused": 0}

    async def ask(session: aiohttp.ClientSession, case: Json) -> None:
        tools = [{"type": "function", "function": {**f, "strict": strict}} for f in case["functions"]]
        body = {"messages": case["messages"], "tools": tools, "temperature": 0, "max_tokens": 400}
        async with turn, session.post(f"{url}/v1/chat/completions", json=body) as response:
            answer = await response.json()
        if response.status != 200:
            counts["refused"] += 1
            print(answer, file=sys.stderr)
            return
        message = answer["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        content = message.get("content") or ""
        valid = [is_valid(call, case["functions"]) for call in calls]
        lost = content.count("<tool_call>")  # text that begins like a call but is not one
        counts["begun"] += bool(calls or lost)
        counts["calls"] += len(calls) + lost
        counts["valid"] += sum(valid)
        counts["right"] += bool(calls) and all(valid) and is_expected(calls, case["expected"])

    began = time.monotonic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as session:
        await asyncio.gather(*(ask(session, case) for case in cases))
    return {**counts, "seconds": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cases", type=Path, required=True, help="the folder bfcl_eval/data of the package bfcl-eval")
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--option", nargs="*", default=[], help="further arguments of quire serve")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = read_cases(arguments.cases, arguments.number)
    command = [sys.executable, "-m", "quire", "serve", arguments.model, "--port", "0", "--max-model-len", "8192"]
    server = subprocess.Popen([*command, *arguments.option], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        url = next(found[1] for line in server.stderr if (found := re.search(r"Serving at (\S+): ", line)))
        results = {}
        for name, strict in (("plain", False), ("strict", True)):
            results[name] = asyncio.run(ask_all(url, cases, strict, arguments.streams))
            counts = results[name]
            share = counts["valid"] / max(counts["calls"], 1)
            print(f"{name:7} {len(cases)} questions: {counts['begun']} answers with calls, {counts['calls']} calls,")
            print(f"        {counts['valid']} valid ({share:.1%}), {counts['right']} answers as expected,")
            print(f"        {counts['refused']} refused, {counts['seconds']:.0f} s", flush=True)
    finally:
        server.terminate()
        server.wait()
    if arguments.json:
        arguments.json.write_text(json.dumps({"model": arguments.model, "questions": len(cases), **results}, indent=1))


if __name__ == "__main__":
    main()
