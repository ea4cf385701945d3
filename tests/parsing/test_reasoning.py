"""Reasoning, apart from the answer."""

import pytest

from quire_parsing.reasoning import REASONING
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
    ("qwen3", True, "A <tool_call> would do.</think>Yes", "A <tool_call> would do.", "Yes"),
    ("kimi_k2", False, "<think>I call.<|tool_calls_section_begin|>", "I call.", "<|tool_calls_section_begin|>"),
    ("granite", False, "Here's my thought process: a Here is my response: b", " a ", " b"),
    ("granite", False, "Here is my dog", "", "Here is my dog"),
    ("mistral", False, "[THINK]I think.[/THINK]Paris.", "I think.", "Paris."),
    ("seed_oss", True, "I think.</seed:think>Paris.", "I think.", "Paris."),
    ("hunyuan_a13b", False, "<think>\nI\n</think>\n<answer>\nParis\n</answer>", "\nI\n", "\n\nParis\n"),
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
