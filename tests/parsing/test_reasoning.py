"""Reasoning, apart from the answer."""

import pytest

from quire.parsing.reasoning import REASONING
from support.parsing import parse, parts_of

# (format, whether the prompt ended within thinking, answer, reasoning, content)
_ANSWERS = [
    ("deepseek_r1", True, "I think.\n</think>\n\nParis.", "I think.\n", "\n\nParis."),
    ("deepseek_r1", True, "<think>\nI think.</think>Paris.", "\nI think.", "Paris."),
    ("deepseek_r1", True, "I think, and the tokens end", "I think, and the tokens end", ""),
    ("qwen3", False, "<think>\na < b </thin\n</think>\n\nParis.", "\na < b </thin\n", "\n\nParis."),
    ("qwen3", False, "No thinking, no <think> either", "", "No thinking, no <think> either"),
    ("qwen3", False, "\n\nParis", "", "\n\nParis"),
    ("qwen3", True, "I call.\n<tool_call>\n<function=f>", "I call.\n", "<tool_call>\n<function=f>"),
    ("qwen3", True, "A <tool_call> ends it.", "A ", "<tool_call> ends it."),
    ("qwen3", True, "a<think>b</think>c</think>d", "ab", "cd"),
    ("qwen3", False, "</think>Paris", "", "Paris"),
    ("qwen3", True, "</think>\n\nParis", "", "\n\nParis"),
    ("qwen3", False, "Write <tool_call></think></tool_call>", "", "Write <tool_call></think></tool_call>"),
    ("deepseek_r1", True, "I call.<｜tool▁calls▁begin｜>", "I call.", "<｜tool▁calls▁begin｜>"),
    ("deepseek_v3", True, "I call.<｜DSML｜function_calls>", "I call.", "<｜DSML｜function_calls>"),
    ("deepseek_v4", True, "I call.\n<｜DSML｜tool_calls>", "I call.", "<｜DSML｜tool_calls>"),
    ("glm45", True, "I call.\n\n<tool_call>", "I call.", "<tool_call>"),
    ("glm47", False, "It <think>\nmay \n</think>rain.", "\nmay", "It rain."),
    ("minimax_m2", True, "I call. \n <minimax:tool_call>", "I call.", "<minimax:tool_call>"),
    ("mistral", False, "It [THINK]may\n[/THINK]rain.", "may", "It rain."),
    ("mistral", False, "[THINK]I call.[TOOL_CALLS]", "I call.", "[TOOL_CALLS]"),
    ("mimo", True, "I call.\n<tool_call>", "I call.\n", "<tool_call>"),
    ("nemotron_v3", True, "I\n\ncall.\n<tool_call>", "I\n\ncall.", "<tool_call>"),
    ("step3p5", True, "I think.\n</think>\nParis", "I think.", "\nParis"),
    ("step3p5", True, " \n", "", ""),
    ("seed_oss", True, "I call.\n<seed:tool_call>", "I call.\n", "<seed:tool_call>"),
    ("kimi_k2", False, "<think>I call.<|tool_calls_section_begin|>", "I call.", "<|tool_calls_section_begin|>"),
    ("granite", False, "Here's my thought process: a Here is my response: b", " a ", " b"),
    ("granite", False, "Here is my dog", "", "Here is my dog"),
    ("mistral", False, "[THINK]I think.[/THINK]Paris.", "I think.", "Paris."),
    ("seed_oss", True, "I think.</seed:think>Paris.", "I think.", "Paris."),
    ("hunyuan_a13b", False, "<think>\nI\n</think>\n<answer>\nParis\n</answer>", "I", "Paris"),
    ("hunyuan_a13b", False, "<think>\nI\n</think>\nParis", "I", "Paris"),
    ("step3", True, "<think>I think.</think>Paris.", "I think.", "Paris."),
    ("hunyuan_a13b", False, "<think>\n\n</think>\n<answer>\nParis\n\n</answer>", "", "Paris\n"),
    ("ernie45", True, "I think.\n</think>\n\n<response>\nParis\n</response>\n", "I think.\n", "\n\n\nParis\n\n"),
    (
        "openai_gptoss",
        False,
        "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final<|message|>Paris.",
        "I think.",
        "Paris.",
    ),
    ("openai_gptoss", False, "<|channel|>final<|message|>Paris.<|return|>", "", "Paris."),
]


@pytest.mark.parametrize(("name", "is_open", "text", "reasoning", "content"), _ANSWERS)
def test_reasoning_is_apart_from_content_in_any_split(
    name: str, is_open: bool, text: str, reasoning: str, content: str
):
    for cuts in ([], range(len(text)), *([cut] for cut in range(len(text)))):
        parsed = parse(lambda: REASONING[name].make(is_open), parts_of(text, cuts))
        assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_a_call_ends_the_thinking_alone_where_no_grammar_waits_for_the_end_of_it():
    text = "I call.<tool_call></think>{}"
    parsed = parse(lambda: REASONING["qwen3"].make(True, calls_end=False), [text])
    assert (parsed.reasoning, parsed.content) == ("I call.<tool_call>", "{}")
    parsed = parse(lambda: REASONING["glm45"].make(True, calls_end=False), ["I.</think><think></think>"])
    assert (parsed.reasoning, parsed.content) == ("I.", "<think></think>")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("I think.", "I think.", "I think."),
        ("I think.\n</think>\n\n", "I think.", "I think."),
        ("I think.</think>\nParis.", "I think.", "\nParis."),
        ("I call.<tool_call>", "I call.", "<tool_call>"),
        ("", "", ""),
    ],
)
def test_thinking_without_an_answer_becomes_the_answer_as_well_if_the_request_says_so(
    text: str, reasoning: str, content: str
):
    format = REASONING["nemotron_v3"]
    assert format.is_promoted({"force_nonempty_content": True})
    assert not format.is_promoted({"force_nonempty_content": "true"})
    assert not REASONING["qwen3"].is_promoted({"force_nonempty_content": True})
    for cuts in ([], range(len(text))):
        parsed = parse(lambda: format.make(True, is_promoted=True), parts_of(text, cuts))
        assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_the_end_of_the_prompt_tells_whether_the_answer_begins_within_thinking():
    assert REASONING["qwen3"].is_open("<|im_start|>assistant\n<think>\n")
    assert not REASONING["qwen3"].is_open("<|im_start|>assistant\n")
    assert not REASONING["qwen3"].is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert REASONING["deepseek_r1"].is_open("<｜Assistant｜>")
    assert not REASONING["deepseek_r1"].is_open("<｜Assistant｜></think>")


def test_a_piece_of_reasoning_is_told_as_soon_as_it_cannot_be_a_marker():
    parser = REASONING["qwen3"].make(True)
    told = ["".join(getattr(event, "text", "") for event in parser.feed(part)) for part in ("a <", "/th", "x", " b")]
    assert told == ["a ", "", "</thx", " b"]
