"""Grammars of strict tools: what they allow is read as valid calls, for every format, and nothing else is allowed."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from quire import StructuredOutputsParams
from quire.checkpoints.hub import bundled_model
from quire.checkpoints.metadata import load_tokenizer
from quire.parsing.events import Content, ToolArguments, ToolCall
from quire.parsing.formats import TOOLS
from quire.parsing.strict import STRICT
from quire.structured.grammar import TokenTable
from quire.structured.guidance import GuidanceBackend
from quire.structured.vocabulary import Vocabulary

EOS = 2
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"$ref": "#/$defs/units"},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"units": {"enum": ["C", "F"]}},
}
PLACE = {"type": "object", "properties": {"at": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}}}
PLACE |= {"required": ["at"], "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "go.to": PLACE}


def tools(strict: bool = True) -> list[dict[str, Any]]:
    common = {"strict": True} if strict else {}
    return [{"type": "function", "function": {"name": n, "parameters": s, **common}} for n, s in SCHEMAS.items()]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(bundled_model())


@pytest.fixture(scope="module")
def backend(tokenizer):
    return GuidanceBackend(Vocabulary(tokenizer, tokenizer.vocab_size, [EOS]))


def compiled(backend, tag: dict[str, Any]):
    return backend.compile(StructuredOutputsParams(structural_tag=json.dumps(tag)))


def drawn(backend, tokenizer, tag: dict[str, Any], seed: int) -> str:
    """A text of uniformly drawn tokens under the masks, which ends as soon as it may."""
    chance, matcher = random.Random(seed), compiled(backend, tag).fork()
    bits = np.empty((1, -(-tokenizer.vocab_size // 32)), np.int32)
    data = b""
    for _ in range(600):
        backend.fill([matcher], bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        if EOS in allowed:
            return data.decode()
        token = int(chance.choice(allowed))
        assert matcher.accept(token)
        data += tokenizer.token_bytes[token]
    raise AssertionError(data.decode(errors="replace"))


def accepts(backend, tokenizer, tag: dict[str, Any], text: str) -> bool:
    matcher = compiled(backend, tag).fork()
    return all(matcher.accept(token) for token in tokenizer.encode(text, add_special_tokens=False)) and matcher.accept(
        EOS
    )


def read(name: str, text: str, definitions) -> tuple[str, list[tuple[str, Any]]]:
    parser = TOOLS[name].make(definitions)
    events = parser.feed(text) + parser.finish()
    calls: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, ToolCall):
            calls[event.index] = [event.name]
        elif isinstance(event, ToolArguments):
            calls[event.index].append(event.text)
    content = "".join(event.text for event in events if isinstance(event, Content))
    return content, [(call[0], json.loads("".join(call[1:]))) for call in calls.values()]


@pytest.mark.parametrize("name", STRICT)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go.to"}}], ids=str)
def test_what_the_grammar_allows_is_a_valid_call(backend, tokenizer, name, choice):
    tag = STRICT[name].tag(tools(), choice, False, "auto")
    for seed in range(3):
        content, calls = read(name, drawn(backend, tokenizer, tag, seed), tools())
        assert content.strip() == ""
        assert len(calls) >= 1
        for called, arguments in calls:
            assert called == "go.to" or choice == "required"
            jsonschema.validate(arguments, SCHEMAS[called])


@pytest.mark.parametrize("name", STRICT)
def test_several_calls_are_allowed_unless_the_request_says_otherwise(backend, tokenizer, name):
    form = STRICT[name]
    one = drawn(backend, tokenizer, form.tag(tools(), "required", False, "auto"), 1)
    opening, closing = form.section or ("", "")
    inner = one.removeprefix(opening).removesuffix(closing)
    two = opening + inner + form.separator + inner + closing
    assert accepts(backend, tokenizer, form.tag(tools(), "required", True, "auto"), two)
    assert not accepts(backend, tokenizer, form.tag(tools(), "required", False, "auto"), two)
    assert len(read(name, two, tools())[1]) == 2


@pytest.mark.parametrize("name", STRICT)
def test_text_is_free_until_a_call_begins(backend, tokenizer, name):
    form = STRICT[name]
    tag = form.tag(tools(), "auto", True, "auto")
    call = drawn(backend, tokenizer, form.tag(tools(), "required", False, "auto"), 2)
    assert accepts(backend, tokenizer, tag, "Just an answer: <b>{1}</b>, and no call.")
    assert accepts(backend, tokenizer, tag, f"I will look.\n\n{call}")
    assert not accepts(backend, tokenizer, tag, f"I will look.\n\n{call[:-1]}")
    assert not accepts(backend, tokenizer, tag, call.replace("get_weather", "get_time").replace("go.to", "go_to"))


def test_only_strict_tools_are_bound_to_their_schemas(backend, tokenizer):
    form, mixed = STRICT["hermes"], tools()
    del mixed[1]["function"]["strict"]
    wrong = '<tool_call>\n{"name": "%s", "arguments": {"at": "here"}}\n</tool_call>'
    tag = form.tag(mixed, "auto", True, "auto")
    assert accepts(backend, tokenizer, tag, wrong % "go.to")
    assert not accepts(backend, tokenizer, tag, wrong % "get_weather")
    assert not accepts(backend, tokenizer, form.tag(mixed, "auto", True, "parameter"), wrong % "go.to")


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "deepseek_v32"])
def test_levels_of_the_server(backend, tokenizer, name):
    form, plain = STRICT[name], tools(strict=False)
    assert form.tag(plain, "auto", True, "auto") is None
    assert form.tag(plain, "required", True, "auto") is None
    call = drawn(backend, tokenizer, form.tag(tools(), "required", False, "auto"), 3)
    tag = form.tag(plain, "auto", True, "function")
    assert accepts(backend, tokenizer, tag, call)
    assert not accepts(backend, tokenizer, tag, call.replace("get_weather", "get_time").replace("go.to", "go_to"))


def test_an_unknown_function_is_named():
    with pytest.raises(ValueError, match="tool_choice names the function 'f', which is not in tools"):
        STRICT["hermes"].tag(tools(), {"type": "function", "function": {"name": "f"}}, True, "auto")


def test_parameters_that_are_any_text_may_contain_markup(backend, tokenizer):
    schema = {
        "type": "object",
        "properties": {"code": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["code"],
    }
    definition = {"type": "function", "function": {"name": "run", "parameters": schema, "strict": True}}
    tag = STRICT["qwen3_coder"].tag([definition], "auto", True, "auto")
    code = "<parameter=code>\nif a < b:\n  x = '<b>'\n</parameter>\n"
    call = f"<tool_call>\n<function=run>\n{code}%s</function>\n</tool_call>"
    assert accepts(backend, tokenizer, tag, call % "")
    assert accepts(backend, tokenizer, tag, call % "<parameter=n>\n12\n</parameter>\n")
    assert not accepts(backend, tokenizer, tag, call % "<parameter=n>\ntwelve\n</parameter>\n")


def test_special_tokens_stand_for_themselves():
    """In free text and in a tag, the token is another thing than its spelling."""
    texts = ["", "<end>", "<|call|>", "<|done|>", *map(chr, range(32, 127))]
    table = TokenTable([text.encode() for text in texts], [1, 2, 3], [1], None)
    backend = GuidanceBackend(table)
    tag = {"type": "tag", "begin": "<|call|>f", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}}
    free = {"type": "triggered_tags", "triggers": ["<|call|>"], "tags": [{**tag, "end": "<|done|>"}]}
    matcher = compiled(backend, {"type": "structural_tag", "format": free})

    def ids(text: str) -> list[int]:
        return [texts.index(character) for character in text]

    def takes(tokens: list[int]) -> bool:
        state = matcher.fork()
        return all(state.accept(token) for token in tokens) and state.accept(1)

    assert takes([*ids("Hi <|call|>x"), 2, *ids("f12"), 3, *ids(" bye")])
    assert not takes([2, *ids("g12"), 3])
    assert not takes([2, *ids("f12<|done|>")])
    assert not takes([*ids("Hi"), 3])


def test_a_block_of_json_that_names_a_function_is_a_call(backend, tokenizer):
    """As Qwen2.5-Coder writes it; other blocks are free."""
    tag = STRICT["hermes"].tag(tools(), "auto", True, "auto")
    block = '```json\n{\n  "name": "%s",\n  "arguments": %s\n}\n```'
    assert accepts(backend, tokenizer, tag, "I look.\n" + block % ("go.to", '{"at": [1]}'))
    assert not accepts(backend, tokenizer, tag, block % ("go.to", '{"at": "here"}'))
    assert accepts(backend, tokenizer, tag, block % ("my-package", '{"at": "here"}'))
    indented = block % ("go.to", '{\n    "at": [1]\n  }')
    assert read("hermes", f"I look.\n{indented}", tools())[1] == [("go.to", {"at": [1]})]
    package = '```json\n{\n  "name": "my-package",\n  "version": "1.0"\n}\n```'
    assert read("hermes", package, tools()) == (package, [])
    assert read("hermes", block % ("my-package", "{}"), tools()) == (block % ("my-package", "{}"), [])
    assert read("hermes", block % ("go.to", "{}"), []) == (block % ("go.to", "{}"), [])


@pytest.mark.parametrize("text", ["", "I look.\n", "```xml\n"])
@pytest.mark.parametrize("call", ['{"name": "%s", "arguments": %s}', '{\n  "name": "%s",\n  "arguments": %s\n}'])
def test_an_object_that_names_a_function_is_a_call_without_markers(text, call):
    """As small models of Qwen2.5-Coder write it; other objects are content."""
    answer = text + call % ("go.to", '{"at": [1]}') + "\n" + call % ("get_weather", "{}")
    assert read("hermes", answer, tools()) == (text.removesuffix("\n"), [("go.to", {"at": [1]}), ("get_weather", {})])
    for other in (call % ("my-package", "{}"), '{"name": "go.to", "version": 1}', '{"name": "go', '{"names": []}'):
        assert read("hermes", text + other, tools()) == (text + other, [])
    assert read("hermes", answer, []) == (answer, [])


def test_an_object_that_names_a_function_is_constrained(backend, tokenizer):
    tag = STRICT["hermes"].tag(tools(), "auto", True, "auto")
    call = '{"name": "%s", "arguments": %s}'
    assert accepts(backend, tokenizer, tag, "I look.\n" + call % ("go.to", '{"at": [1]}'))
    assert not accepts(backend, tokenizer, tag, call % ("go.to", '{"at": "here"}'))
    assert accepts(backend, tokenizer, tag, call % ("my-package", '{"at": "here"}'))
