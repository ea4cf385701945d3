"""The official JSON-Schema-Test-Suite: how many schemas are accepted, and that what they allow is valid."""

import json
import random

import jsonschema
import numpy as np
import pytest

from quire import StructuredOutputsParams
from quire.checkpoints.hub import bundled_model
from quire.checkpoints.metadata import load_tokenizer
from quire.structured.guidance import GuidanceBackend
from quire.structured.vocabulary import Vocabulary
from support.schema_suite import Case, schema_suite

pytestmark = pytest.mark.slow
EOS = 2
STARTS = ["{", "[", '"', "1", "t", "{", "[", '{"foo', '{"bar', '["foo']
LIKELY = '{}[]",: 0123456789ab'  # tokens that end a document sooner, or make it one of the suite's


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> list[Case]:
    return schema_suite(tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="module")
def accepted(cases):
    """(case, grammar) of each schema that is accepted."""
    tokenizer = load_tokenizer(bundled_model())
    backend = GuidanceBackend(Vocabulary(tokenizer, tokenizer.vocab_size, [EOS]))
    found = []
    for case in cases:
        try:
            found.append((case, backend.compile(StructuredOutputsParams(json=json.dumps(case.schema)))))
        except ValueError:
            continue
    return found


def test_three_quarters_of_the_suite_are_accepted(cases, accepted):
    assert len(cases) > 350
    assert len(accepted) / len(cases) >= 0.85  # 0.75 are asked for


def random_text(grammar, tokenizer, start: str, chance: random.Random) -> str | None:
    """A text of random tokens that begins with `start` if the grammar allows it; None if it does not end."""
    matcher, output = grammar.fork(), []
    likely = [token for character in LIKELY for token in tokenizer.encode(character, add_special_tokens=False)]
    for token in tokenizer.encode(start, add_special_tokens=False):
        if matcher.state.validate_tokens([token]) == 0:
            break
        matcher.accept(token)
        output.append(token)
    while len(output) < 150:
        bits = np.frombuffer(matcher.state.compute_bitmask(), np.uint8)
        choices = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        if EOS in choices and (len(choices) == 1 or chance.random() < 0.3):
            return tokenizer.decode(output)
        preferred = [token for token in likely if token in choices] if chance.random() < 0.8 else []
        token = chance.choice(preferred or [choice for choice in choices if choice != EOS])
        assert matcher.accept(token), matcher.error
        output.append(token)
    return None


@pytest.mark.nightly
def test_every_text_that_ends_is_valid(accepted):
    tokenizer, chance, ended = load_tokenizer(bundled_model()), random.Random(3), 0
    for case, grammar in accepted:
        validator = jsonschema.Draft202012Validator(
            case.schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        for start in STARTS:
            text = random_text(grammar, tokenizer, start, chance)
            if text is not None:
                ended += 1
                errors = [error.message for error in validator.iter_errors(json.loads(text))]
                assert not errors, (case, text)
    assert ended > 5 * len(accepted)
