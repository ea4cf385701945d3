"""Thinking, and thinking followed by calls, in the formats of support.newer_answers; answers that end within a call."""

import json
import random

import pytest

from quire.parsing.answer import answer_parser
from quire.parsing.formats import TOOLS
from quire.parsing.reasoning import REASONING
from support.answers import DEFINITIONS, PARIS, Sample
from support.newer_answers import NEWER
from support.parsing import parse, parts_of

_PLAMO = "<|plamo:{}_think:plamo|>"
_MUSE_THOUGHT = " to=self<|message|>I think.<|eom|><|start|>assistant"
_MUSE_CALL = '<atem:invoke name="now">\n</atem:invoke>'

# format of the thinking → the text before and behind "I think."
_THINKING = {
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "cohere_command4": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "deepseek_v41": ("<think>", "</think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "hy_v3": ("<think>", "</think>"),
    "hy_v4": ("<think>", "</think>"),
    "inkling": ("<|content_thinking|>", "<|end_message|><|message_model|>"),
    "k2_horizon": ("<ifm|think_fast>", "</ifm|think_fast>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "muse": (" to=self<|message|>", "<|eom|><|start|>assistant"),
    "muse_glimmer": (" to=self<|message|>", "<|eom|><|start|>assistant"),
    "plamo3": (_PLAMO.format("begin"), _PLAMO.format("end")),
    "step5": ("<think>", "</think>"),
}
# (format, whether the prompt ended within thinking, answer, reasoning, content)
_ANSWERS = [
    ("cohere_command3", False, "<|START_RESPONSE|>It is.<|END_RESPONSE|>", "", "It is."),
    (
        "cohere_command3",
        True,
        "I <co>think</co: 0:[1]>.<|END_THINKING|><|START_RESPONSE|>"
        "It <co>is</co: 0:[1,2],1:[0]>, </co, </co: <|END_RESPONSE|>",
        "I think.",
        "It is, </co, </co: ",
    ),
    ("cohere_command3", False, "<|START_ACTION|><co><|END_ACTION|><co>", "", "<|START_ACTION|><co><|END_ACTION|>"),
    ("cohere_command4", True, "I think.<|END_THINKING|><|START_TEXT|>It is.<|END_TEXT|>", "I think.", "It is."),
    ("gemma4", True, "I think.<channel|>It is.", "I think.", "It is."),
    ("gemma4", False, "It is.", "", "It is."),
    ("gemma4", True, "I call.<|tool_call>call:now{}", "I call.", "<|tool_call>call:now{}"),
    ("granite_thinking_parser", True, "I think.</think>It is.", "I think.", "It is."),
    ("hy_v4", False, "<think></think>It is.", "", "It is."),
    ("inkling", False, "<|content_text|>It is.<|end_message|>", "", "It is."),
    ("inkling", True, "I think.<|end_message|><|message_model|><|content_text|>It is.", "I think.", "It is."),
    ("k2_horizon", True, "I call.<ifm|tool_calls>", "I call.", "<ifm|tool_calls>"),
    ("kimi_k3", False, "<|open|>response<|sep|>It is.<|close|>response<|sep|><|close|>message<|sep|>", "", "It is."),
    ("kimi_k3", True, "I <|open|>think.", "I <|open|>think.", ""),
    ("ling3", False, "<think>I think.</think>It is.", "I think.", "It is."),
    ("minicpmv", False, "<think>I think.</think>It is.<|im_end|>", "I think.", "It is."),
    (
        "minicpmv",
        False,
        r"<think>I\nthink.\</think>It\r\nis\\n `\n` \(\n\) $\n$.",
        "I\nthink.\\",
        "It\nis\\\\n `\\n` \\(\\n\\) $\\n$.",
    ),
    ("minicpmv", True, r"\n</think><tool_call>\n</tool_call>\n\r", "\n", "<tool_call>\\n</tool_call>\n\n"),
    ("minimax_m2_append_think", True, "I think.</think>It is.", "", "<think>I think.</think>It is."),
    ("minimax_m2_append_think", False, "<think>I think.</think>It is.", "", "<think>I think.</think>It is."),
    ("minimax_m3", False, "</mm:think>It is.", "", "It is."),
    ("muse", False, f"{_MUSE_THOUGHT} to=user<|message|>It is.<|eot|>", "I think.", "It is."),
    ("muse", False, "to=self<|message|>I write to=x. to=user<|message|>It is.", "I write to=x.", "It is."),
    ("muse", False, "<|message|>I think.<|eom|> to=developer<|message|>x<|eot|>", "I think.", ""),
    ("muse", True, "I think.<|eom|><|start|>assistant to=commentary<|message|>It is.", "I think.", "It is."),
    ("muse_glimmer", False, "<|message|>It is.<|eot|>", "", "It is."),
    ("poolside_v1", True, "I think.</think>It is.", "I think.", "It is."),
    ("plamo3", True, f"I think.{_PLAMO.format('end')}It is.<|plamo:tag|>", "I think.", "It is."),
]


@pytest.mark.parametrize(("name", "is_open", "text", "reasoning", "content"), _ANSWERS)
def test_reasoning_is_apart_from_content_in_any_split(
    name: str, is_open: bool, text: str, reasoning: str, content: str
):
    for cuts in ([], range(len(text)), *([cut] for cut in range(len(text)))):
        parsed = parse(lambda: REASONING[name].make(is_open), parts_of(text, cuts))
        assert (parsed.reasoning, parsed.content) == (reasoning, content)


@pytest.mark.parametrize(
    "sample",
    [sample for sample in NEWER if sample.format in _THINKING and sample.calls and "<atem" not in sample.text[:5]],
    ids=lambda sample: sample.format,
)
def test_calls_follow_the_thinking(sample: Sample):
    before, behind = _THINKING[sample.format]
    text = before + "I think." + behind + sample.text
    generator = random.Random(7)
    for cuts in ([], range(len(text)), *([generator.randrange(len(text)) for _ in range(3)] for _ in range(20))):
        parsed = parse(lambda: answer_parser(sample.format, sample.format, DEFINITIONS), parts_of(text, cuts))
        assert parsed.reasoning == "I think."
        assert parsed.content == sample.content
        assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == sample.calls


@pytest.mark.parametrize("name", sorted(_THINKING))
def test_thinking_that_does_not_end_is_thinking(name: str):
    text = _THINKING[name][0] + "I think, and the tokens"
    for cuts in ([], range(len(text))):
        parsed = parse(lambda: answer_parser(name, name, DEFINITIONS), parts_of(text, cuts))
        assert (parsed.reasoning, parsed.content, parsed.calls) == ("I think, and the tokens", "", [])


@pytest.mark.parametrize("name", ["muse", "muse_glimmer"])
def test_a_call_in_the_text_of_another_channel_is_none(name: str):
    text = f" to=self<|message|>Is it {_MUSE_CALL}?<|eom|><|start|>assistant to=user<|message|>No: {_MUSE_CALL}<|eot|>"
    parsed = parse(lambda: answer_parser(name, name, DEFINITIONS), [text])
    assert (parsed.reasoning, parsed.content, parsed.calls) == (f"Is it {_MUSE_CALL}?", f"No: {_MUSE_CALL}", [])


@pytest.mark.parametrize(
    "sample", [sample for sample in NEWER if sample.calls[:1] == [PARIS]], ids=lambda sample: sample.format
)
def test_an_answer_that_ends_within_the_arguments_keeps_their_beginning(sample: Sample):
    text = sample.text[: sample.text.index("Paris") + len("Par")]
    for cuts in ([], range(len(text))):
        [(name, arguments)] = parse(lambda: TOOLS[sample.format].make(DEFINITIONS), parts_of(text, cuts)).calls
        assert (name, arguments.replace(" ", "")) == ("get_weather", '{"city":"Par')


def test_the_schema_decides_what_nested_elements_are():
    properties = {
        "orders": {"type": "array", "items": {"properties": {"number": {"type": "integer"}, "note": {}}}},
        "one": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "number"}}]},
        "none": {"type": "array"},
        "empty": {"type": "object"},
        "names": {"type": "object", "properties": {"first": {"type": "string"}}},
    }
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    text = (
        '<tool_call><invoke name="f"><orders><item><number>1</number><note>2</note></item><item>'
        "<number>3</number></item></orders><one><item>1.5</item></one><none></none><empty> </empty>"
        "<names>x<first>4</first></names><rest>5</rest></invoke></tool_call>"
    ).replace("<", "]<]minimax[>[<")
    expected = {
        "orders": [{"number": 1, "note": 2}, {"number": 3}],
        "one": [1.5],
        "none": [],
        "empty": {},
        "names": {"first": "4", "$text": "x"},
        "rest": "5",
    }
    for cuts in ([], range(len(text))):
        [(name, arguments)] = parse(lambda: TOOLS["minimax_m3"].make(tools), parts_of(text, cuts)).calls
        assert (name, json.loads(arguments)) == ("f", expected)


def test_elements_that_do_not_end_as_they_should_end_the_call():
    for text in ("<a><b>1</a>", "<a>" * 100, "</b>"):
        marked = f'<tool_call><invoke name="edit_file">{text}'.replace("<", "]<]minimax[>[<")
        assert parse(lambda marked=marked: TOOLS["minimax_m3"].make(DEFINITIONS), [marked]).calls == [("edit_file", "")]


def test_types_that_the_model_writes_count_where_the_schema_has_none():
    argument = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'
    arguments = [("days", "string", "3"), ("x", "number", "3"), ("y", "string", "3"), ("z", "unknown", "3")]
    text = "".join(argument.format(*values) for values in arguments)
    text = f'<|open|>call tool="get_weather" index="1"<|sep|>{text}<|close|>call<|sep|>'
    [(_, found)] = parse(lambda: TOOLS["kimi_k3"].make(DEFINITIONS), [text]).calls
    assert json.loads(found) == {"days": 3, "x": 3, "y": "3", "z": "3"}
