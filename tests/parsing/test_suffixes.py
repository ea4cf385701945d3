"""Markers with the suffix of a checkpoint."""

from quire.engine.frontend import chosen_parser
from quire.parsing.answer import answer_parser
from quire.parsing.formats import TOOLS
from quire.parsing.reasoning import REASONING
from quire.parsing.recognition import recognized
from quire.parsing.suffixes import suffix_in
from support.answers import DEFINITIONS, PARIS
from support.parsing import parse, parts_of

_VOCABULARY = ["<seed:think>", "the", "<think:abc>", "</think:abc>", "<tool_calls:abc>"]
_TEXT = (
    "<think:abc>I call <tool_call>.</think:abc><tool_calls:abc><tool_call:abc>get_weather<tool_sep:abc>"
    "<arg_key:abc>city</arg_key:abc><arg_value:abc>Paris</arg_value:abc></tool_call:abc></tool_calls:abc>"
)


def test_the_suffix_is_found_in_the_vocabulary():
    assert suffix_in(_VOCABULARY) == ":abc"
    assert suffix_in(["<think>", "<seed:think>", "<tool_calls>", "<arg_key: x>"]) == ""


def test_a_format_has_the_suffix_of_the_vocabulary():
    tools, reasoning = dict(TOOLS), dict(REASONING)
    tool = chosen_parser("tool_call_parser", "hy_v3", None, tools, lambda: _VOCABULARY)
    thinking = chosen_parser("reasoning_parser", None, "hy_v3", reasoning, lambda: _VOCABULARY)
    assert (tool, thinking) == ("hy_v3:abc", "hy_v3:abc")
    assert reasoning["hy_v3:abc"].start == ("<think:abc>",)
    assert reasoning["hy_v3:abc"].is_open("<assistant><think:abc>")
    for cuts in ([], range(len(_TEXT))):
        parsed = parse(lambda: reasoning["hy_v3:abc"].make(False), parts_of(_TEXT, cuts))
        assert parsed.reasoning == "I call <tool_call>."
        calls = parse(lambda: tools["hy_v3:abc"].make(DEFINITIONS), parts_of(_TEXT, cuts))
        assert [name for name, _ in calls.calls] == [PARIS[0]]
        assert calls.calls[0][1] == '{"city": "Paris"}'


def test_a_vocabulary_without_a_suffix_leaves_the_format_as_it_is():
    assert chosen_parser("tool_call_parser", "hy_v3", None, dict(TOOLS), lambda: ["<think>"]) == "hy_v3"
    assert chosen_parser("tool_call_parser", "hermes", None, dict(TOOLS), lambda: _VOCABULARY) == "hermes"
    plain = _TEXT.replace(":abc", "")
    parsed = parse(lambda: answer_parser("hy_v3", "hy_v3", DEFINITIONS), [plain])
    assert [name for name, _ in parsed.calls] == [PARIS[0]]


def test_a_template_is_recognized_with_a_suffix():
    template = "{{ '<think:abc>' }}</think:abc><tool_calls:abc><tool_call:abc><tool_sep:abc><arg_key:abc>"
    assert recognized(template) == ("hy_v3", "hy_v3")
    assert recognized(template.replace(":abc", "")) == ("hy_v3", "hy_v3")
