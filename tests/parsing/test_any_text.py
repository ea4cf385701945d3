"""Whole and broken answers and other texts: no parser raises, loses text, depends on the split, or takes long."""

import random
import re
import time

import pytest

from quire.parsing.answer import answer_parser
from quire.parsing.events import Parser
from quire.parsing.formats import TOOLS
from quire.parsing.reasoning import REASONING
from support.answers import DEFINITIONS
from support.newer_answers import ALL_SAMPLES as SAMPLES
from support.parsing import Parsed, parse, parts_of

_NAMES = {sample.format for sample in SAMPLES}
_LENGTH = 20_000
_ALPHABET = [*"\"'\\{}[](),:;=<>|/ \n", "name", "arguments", "null", "x1", "ä🏔"]


def _broken(generator: random.Random, name: str) -> str:
    """An answer in which characters and markers are left out, doubled and mixed."""
    texts = [sample.text for sample in SAMPLES if sample.format == name]
    atoms = [atom for text in texts for atom in re.findall(r"<[^<>]*>|\w+|\W", text)] + _ALPHABET
    if generator.random() < 0.5:
        return "".join(generator.choices(atoms, k=generator.randrange(1, 30)))
    characters = list(generator.choice(texts))
    for _ in range(generator.randrange(1, 5)):
        place = generator.randrange(len(characters) + 1)
        characters[place : place + generator.choice([0, 1, 10, 1000])] = generator.choice([[], atoms[:1], *atoms])
    return "".join(characters)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(REASONING))
def test_any_split_of_thinking_and_calls_gives_the_same_events(name: str):
    format = REASONING[name]
    generator = random.Random(name)
    tools = name if name in TOOLS else "hermes"
    calls = [sample.text for sample in SAMPLES if sample.format == tools]
    atoms = [
        *format.start,
        *format.end,
        *format.implicit_ends,
        *format.wrapper,
        *calls,
        " ",
        "\n",
        "\n\n",
        "a",
        "<",
        "b c",
    ]
    for number in range(60):
        text = "".join(generator.choices(atoms, k=generator.randrange(1, 9)))[: generator.choice([None, -1, -2, -9])]

        def parsed(cuts: list[int], text: str = text, number: int = number) -> Parsed:
            def make() -> Parser:
                parser = answer_parser(
                    name,
                    tools if number % 3 else None,
                    DEFINITIONS,
                    starts_in_thinking=number % 2 == 0,
                    is_constrained=number % 7 == 0,
                    is_promoted=number % 5 == 0,
                )
                assert parser is not None
                return parser

            return parse(make, parts_of(text, cuts))

        whole = parsed([])
        assert parsed(list(range(len(text)))) == whole
        assert parsed([generator.randrange(len(text) + 1) for _ in range(3)]) == whole


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(_NAMES))
def test_any_split_of_a_broken_answer_gives_the_same_events(name: str):
    generator = random.Random(name)
    for number in range(90):
        text = _broken(generator, name)
        reasoning = None if number % 3 else generator.choice(list(REASONING))
        choice = generator.choice(["auto", "auto", "required"])

        def parsed(
            cuts: list[int], text: str = text, reasoning: str | None = reasoning, choice: str = choice
        ) -> Parsed:
            return parse(lambda: answer_parser(reasoning, name, DEFINITIONS, tool_choice=choice), parts_of(text, cuts))

        whole = parsed([])
        assert parsed(list(range(len(text)))) == whole
        assert parsed([generator.randrange(len(text) + 1) for _ in range(3)]) == whole


@pytest.mark.parametrize("name", sorted({name for name in _NAMES if not TOOLS[name].whole and not TOOLS[name].noise}))
def test_text_without_a_call_is_content_as_it_is(name: str):
    generator = random.Random(name)
    for _ in range(90):
        text = _broken(generator, name)
        parsed = parse(lambda: TOOLS[name].make(DEFINITIONS), parts_of(text, range(0, len(text), 3)))
        if not parsed.calls:
            noise = "|".join(map(re.escape, TOOLS[name].noise)) or "(?!)"
            assert re.sub(noise, "", parsed.content) == re.sub(noise, "", text)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "beginning", "repeated"),
    [
        *(
            pytest.param(name, "", text, marks=pytest.mark.sampled(4))
            for name in ("hermes", "xlam", "pythonic", "openai", "qwen3_coder")
            for text in '<{[" \\'
        ),
        ("hermes", "", "<tool_call>"),
        ("hermes", '<tool_call>{"arguments": ', "{"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "\\"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {', " "),
        ("qwen3_coder", "", "<tool_call>"),
        ("qwen3_coder", "", "<function="),
        ("qwen3_coder", "<function=f><parameter=a>", "\n"),
        ("glm45", "<tool_call>edit_file<arg_key>options</arg_key><arg_value>", "[(-"),
        ("glm45", "<tool_call>edit_file<arg_key>options</arg_key><arg_value>", "'\\"),
        ("llama3_json", "", "\n{"),
        ("llama3_json", "", "{"),
        ("llama3_json", "", '{"a": '),
        ("llama3_json", "", '{"a"} '),
        ("lfm2", "<|tool_call_start|>[f(a='", "'b', "),
        ("lfm2", "<|tool_call_start|>[f(a=", "{"),
        ("lfm2", "<|tool_call_start|>[f()]<|tool_call_end|>", "[f()]"),
        ("deepseek_v4", '<｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="input">', "{"),
        ("kimi_k2", "", "<|tool_calls_section_begin|>"),
        ("xlam", "", "</think>["),
        ("pythonic", "[f(a=", "'"),
        ("pythonic", "", "[f("),
        ("mistral", "", "[TOOL_CALLS]f"),
        ("kimi_k2", "", "<|tool_call_begin|>"),
        ("gemma4", "<|tool_call>call:f{a:", "{a:["),
        ("gemma4", '<|tool_call>call:f{a:[<|"|>', "<|"),
        ("gemma4", "<|tool_call>call:f{", "a:1,"),
        ("minimax_m3", ']<]minimax[>[<invoke name="f">', "]<]minimax[>[<a>x"),
        ("minimax_m3", ']<]minimax[>[<invoke name="f">', "]<]minimax[>[<a>x]<]minimax[>[</a>"),
        ("minicpm5", '<function name="f"><param name="a">', "&lt"),
        ("muse", " to=self<|message|>", " to=x"),
        ("inkling", "", "<|message_model|>f"),
    ],
)
def test_long_texts_take_time_in_proportion_to_their_length(name: str, beginning: str, repeated: str):
    def duration(length: int, step: int) -> float:
        text = beginning + repeated * (length // len(repeated))
        parser = TOOLS[name].make(DEFINITIONS)
        start = time.process_time()
        for place in range(0, len(text), step):
            parser.feed(text[place : place + step])
        parser.finish()
        return time.process_time() - start

    for step in (1, _LENGTH):
        # Quadratic time would be a factor of 16, and seconds.
        assert duration(_LENGTH, step) < 8 * duration(_LENGTH // 4, step) + 0.5
