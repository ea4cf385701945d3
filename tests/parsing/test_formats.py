"""Tool calls in the formats of the model families."""

import json
import random

import pytest

from quire.parsing.events import ToolArguments
from quire.parsing.formats import TOOLS
from support.answers import DEFINITIONS, PARIS, Sample
from support.newer_answers import ALL_SAMPLES as SAMPLES
from support.parsing import parse, parts_of

_NAMES = [f"{sample.format}-{number}" for number, sample in enumerate(SAMPLES)]


@pytest.mark.parametrize("sample", SAMPLES, ids=_NAMES)
def test_content_and_calls_of_an_answer(sample: Sample):
    parsed = parse(lambda: TOOLS[sample.format].make(DEFINITIONS), [sample.text])
    assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == sample.calls
    assert parsed.content == sample.content


@pytest.mark.parametrize("sample", SAMPLES, ids=_NAMES)
def test_any_split_of_an_answer_or_of_its_beginning_gives_the_same_events(sample: Sample):
    generator = random.Random(7)
    for length in [len(sample.text), *generator.choices(range(len(sample.text)), k=10)]:
        text = sample.text[:length]
        whole = parse(lambda: TOOLS[sample.format].make(DEFINITIONS), [text])
        cuts = [range(length), *([generator.randrange(length + 1) for _ in range(3)] for _ in range(10))]
        for positions in cuts:
            assert parse(lambda: TOOLS[sample.format].make(DEFINITIONS), parts_of(text, positions)) == whole


def test_every_format_has_a_sample_or_is_an_alias():
    sampled = [TOOLS[sample.format] for sample in SAMPLES]
    assert [name for name, format in TOOLS.items() if format not in sampled] == []


_WHOLE_VALUES = {"pythonic", "olmo3", "lfm2"}  # these are read value by value, as are arguments within a JSON string


@pytest.mark.parametrize(
    "sample",
    [
        sample
        for sample in SAMPLES
        if sample.calls[:1] == [PARIS]
        and sample.format not in _WHOLE_VALUES
        and '\\"' not in sample.text.split("Paris")[0]
    ],
    ids=lambda sample: sample.format,
)
def test_arguments_are_told_as_they_arrive_and_kept_if_the_answer_ends(sample: Sample):
    beginning = sample.text[: sample.text.index("Paris") + len("Par")]
    parser = TOOLS[sample.format].make(DEFINITIONS)
    told = "".join(event.text for event in parser.feed(beginning) if isinstance(event, ToolArguments))
    assert told.replace(" ", "") == '{"city":"Par'
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "get_we'),
        ("hermes", '<tool_call>\n{"arguments": {"city": "Par'),
        ("qwen3_coder", "<tool_call>\n<function=get_we"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_we"),
        ("pythonic", "[get_weather(cit"),
        ("mistral", "[TOOL_CALLS]get_we"),
    ],
)
def test_a_call_that_breaks_off_before_its_name_is_known_is_content(name: str, text: str):
    assert parse(TOOLS[name].make, [text]).content == text


def test_a_broken_call_does_not_hide_the_next():
    text = '<tool_call>{"name": "now", "arguments": {"a": </tool_call><tool_call>{"name": "now"}</tool_call>'
    assert parse(TOOLS["hermes"].make, [text]).calls == [("now", '{"a":'), ("now", "{}")]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": "b"\n</tool_call>', '{"a": "b"'),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{\n```<｜tool▁call▁end｜>", "{"),
        ("llama3_json", '{"name": "now", "parameters": {no json}', "{no json}"),
        ("llama3_json", '{"name": "now", "parameters": {"a": "b\n', '{"a": "b\n'),
        ("pythonic", "[now(a='b', c='d\n", '{"a": "b", "c": "d\\n'),
        ("deepseek_v4", '<｜DSML｜invoke name="now"><｜DSML｜parameter name="a">{"b', '{"a": {"b'),
    ],
)
def test_broken_arguments_are_told_as_far_as_they_go(name: str, text: str, arguments: str):
    for cuts in ([], range(len(text))):
        parsed = parse(TOOLS[name].make, parts_of(text, cuts))
        assert (parsed.calls, parsed.content) == ([("now", arguments)], "")


def test_the_model_s_own_ids_of_calls_are_told():
    sample = next(sample for sample in SAMPLES if sample.format == "kimi_k2")
    assert parse(TOOLS["kimi_k2"].make, [sample.text]).ids == ["functions.get_weather:0", "functions.now:1"]


def test_an_object_with_something_other_than_keys_is_not_a_call():
    text = '<tool_call>{1, {"name": "now"}</tool_call>'
    parsed = parse(TOOLS["hermes"].make, [text])
    assert parsed.calls == []
    assert parsed.content == text


def test_special_tokens_are_not_left_out_of_an_answer_with_calls():
    assert [name for name, format in TOOLS.items() if not format.needs_special_tokens] == []
