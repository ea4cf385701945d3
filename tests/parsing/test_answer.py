"""Reasoning and tool calls of one answer together."""

import pytest

from quire_parsing.answer import answer_parser
from support.answers import DEFINITIONS
from support.parsing import parse, parts_of

_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
_HARMONY = (
    "<|channel|>analysis<|message|>I call.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
    "<|constrain|>json<|message|>{}<|call|>"
)


@pytest.mark.parametrize(
    ("reasoning", "tools", "is_open", "text"),
    [
        ("qwen3", "hermes", False, f"<think>I call.</think>\n\n{_CALL}"),
        ("deepseek_r1", "hermes", True, f"I call.</think>{_CALL}\n"),
        ("qwen3", "qwen3_coder", True, "I call.<tool_call>\n<function=now>\n</function>\n</tool_call>"),
        ("mistral", "mistral", False, "[THINK]I call.[/THINK][TOOL_CALLS]now[ARGS]{}"),
        ("openai_gptoss", "openai", False, _HARMONY),
        ("openai_gptoss", None, False, _HARMONY),
        (None, "openai", False, _HARMONY),
        ("qwen3", "openai", False, _HARMONY),
    ],
)
def test_reasoning_and_a_call(reasoning: str | None, tools: str | None, is_open: bool, text: str):
    for cuts in ([], range(len(text)), *([cut] for cut in range(len(text)))):
        parsed = parse(
            lambda: answer_parser(reasoning, tools, DEFINITIONS, starts_in_thinking=is_open), parts_of(text, cuts)
        )
        assert (parsed.reasoning, parsed.content, parsed.calls) == ("I call.", "", [("now", "{}")])


def test_a_call_in_the_reasoning_is_reasoning():
    parsed = parse(lambda: answer_parser("qwen3", "hermes"), [f"<think>{_CALL}</think>Yes"])
    assert (parsed.reasoning, parsed.content, parsed.calls) == (_CALL, "Yes", [])


@pytest.mark.parametrize(
    ("reasoning", "thinking"),
    [
        ("qwen3", "<think>I call.</think>\n\n"),
        ("openai_gptoss", "<|channel|>analysis<|message|>I call.<|end|><|start|>assistant<|channel|>final<|message|>"),
    ],
)
def test_demanded_calls_follow_the_reasoning(reasoning: str, thinking: str):
    text = thinking + '[{"name": "now", "parameters": {}}]'
    for cuts in ([], range(len(text))):
        parsed = parse(lambda: answer_parser(reasoning, None, tool_choice="required"), parts_of(text, cuts))
        assert (parsed.reasoning, parsed.content, parsed.calls) == ("I call.", "", [("now", "{}")])


def test_calls_of_both_parsers_are_numbered_together():
    final = '<|start|>assistant<|channel|>final<|message|>[{"name": "today", "parameters": {"a": 1}}]'
    parsed = parse(lambda: answer_parser("openai_gptoss", None, tool_choice="required"), [_HARMONY + final])
    assert parsed.calls == [("now", "{}"), ("today", '{"a": 1}')]


def test_tool_choice_none_leaves_calls_in_the_content():
    parsed = parse(lambda: answer_parser("qwen3", "hermes", tool_choice="none"), [f"<think>Hm</think>{_CALL}"])
    assert (parsed.content, parsed.calls) == (_CALL, [])


def test_an_answer_without_formats_needs_no_parser():
    assert answer_parser(None, None) is None
    assert answer_parser(None, "hermes", tool_choice="none") is None
