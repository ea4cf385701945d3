"""Tool calls in the formats of the model families."""

import json
import random

import pytest

from quire.text.parsing.formats import TOOLS
from support.answers import DEFINITIONS, SAMPLES, Sample
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
    for length in [len(sample.text), *generator.choices(range(len(sample.text)), k=20)]:
        text = sample.text[:length]
        whole = parse(lambda: TOOLS[sample.format].make(DEFINITIONS), [text])
        cuts = [range(length), *([generator.randrange(length + 1) for _ in range(3)] for _ in range(10))]
        for positions in cuts:
            assert parse(lambda: TOOLS[sample.format].make(DEFINITIONS), parts_of(text, positions)) == whole


def test_every_format_has_a_sample_or_is_an_alias():
    sampled = [TOOLS[sample.format] for sample in SAMPLES]
    assert [name for name, format in TOOLS.items() if format not in sampled] == []
