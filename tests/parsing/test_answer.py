"""Reasoning and tool calls of one answer together."""

import pytest

from quire.parsing.answer import answer_parser
from quire.parsing.reasoning import REASONING
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


_DSML = '<｜DSML｜{0}>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜{0}>'
_TAGGED = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_UNENDED = [
    ("qwen3", "hermes", _CALL),
    ("qwen3", "qwen3_coder", _TAGGED),
    ("deepseek_r1", "deepseek_v3", _DEEPSEEK.format("function<｜tool▁sep｜>now\n```json\n{}\n```")),
    ("deepseek_v3", "deepseek_v3", _DEEPSEEK.format("function<｜tool▁sep｜>now\n```json\n{}\n```")),
    ("deepseek_v3", "deepseek_v31", _DEEPSEEK.format("now<｜tool▁sep｜>{}")),
    ("deepseek_v3", "deepseek_v32", _DSML.format("function_calls")),
    ("deepseek_v4", "deepseek_v4", _DSML.format("tool_calls")),
    ("glm45", "glm45", "<tool_call>now\n</tool_call>"),
    ("glm47", "glm47", "<tool_call>now</tool_call>"),
    ("minimax_m2", "minimax_m2", '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'),
    ("mistral", "mistral", "[TOOL_CALLS]now[ARGS]{}"),
    ("step3p5", "step3p5", _TAGGED),
    ("mimo", "mimo", _TAGGED),
    ("nemotron_v3", "qwen3_coder", _TAGGED),
    ("seed_oss", "seed_oss", "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"),
    (
        "kimi_k2",
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
]


@pytest.mark.parametrize(("reasoning", "tools", "call"), _UNENDED)
def test_a_call_ends_the_thinking_also_if_its_end_marker_is_missing_or_late(reasoning: str, tools: str, call: str):
    end = REASONING[reasoning].end[0]
    for tail in ("", end, f"\n{end}\n"):
        text = f"I call.{call}{tail}"
        for cuts in ([], range(len(text)), *([cut] for cut in range(len(text)))):
            parsed = parse(lambda: answer_parser(reasoning, tools, starts_in_thinking=True), parts_of(text, cuts))
            assert (parsed.reasoning, parsed.content, parsed.calls) == ("I call.", "", [("now", "{}")])


@pytest.mark.parametrize(("reasoning", "tools", "call"), _UNENDED)
def test_a_call_in_an_answer_without_tools_is_text(reasoning: str, tools: str, call: str):
    parsed = parse(lambda: answer_parser(reasoning, None, starts_in_thinking=True), [f"I call.{call}"])
    is_content = reasoning not in ("deepseek_r1", "deepseek_v3")  # as in vLLM
    assert (parsed.reasoning, parsed.content) == (("I call.", call) if is_content else (f"I call.{call}", ""))


@pytest.mark.parametrize("options", [{"tool_choice": "required"}, {"is_constrained": True}])
def test_a_call_does_not_end_the_thinking_where_a_grammar_waits_for_the_end_marker(options: dict):
    text = 'A <tool_call> it is.</think>[{"name": "now", "parameters": {}}]'
    parsed = parse(lambda: answer_parser("qwen3", None, starts_in_thinking=True, **options), [text])
    assert parsed.reasoning == "A <tool_call> it is."


def test_markers_of_thinking_in_arguments_are_arguments():
    call = '<tool_call>{"name": "now", "arguments": {"a": "<think></think>"}}</tool_call>'
    for reasoning in ("qwen3", "glm45"):
        for text in (call, f"<think>I call.{call}", f"<think>I call.</think>{call}"):
            parsed = parse(lambda: answer_parser(reasoning, "hermes"), [text])  # noqa: B023  (it is called at once)
            assert parsed.calls == [("now", '{"a": "<think></think>"}')]
            assert parsed.content == ""


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
