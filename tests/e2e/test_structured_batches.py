"""Structured outputs of the bundled model, offline and through the server: whatever it would say, the text fits."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from quire import LLM, SamplingParams
from quire.messages.structured_outputs import StructuredOutputsParams
from support.engines import assert_nothing_is_left

pytestmark = pytest.mark.texts

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 3},
    },
    "required": ["first_name", "age", "favourite_colour", "pets"],
    "additionalProperties": False,
}
PROMPT = "Once upon a time there was"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=16, max_model_len=512)


def test_texts_of_all_kinds_fit_at_any_temperature(llm):
    constraints = {"json": PERSON}, {"regex": "[a-f]{3,9}x"}, {"choice": ["yes", "no"]}, {"json_object": True}
    asked = [(c, temperature) for c in constraints for temperature in (0.0, 1.0, 5.0)]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=200, structured_outputs=StructuredOutputsParams(**c))
        for i, (c, t) in enumerate(asked)
    ]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    assert_nothing_is_left(llm.core)
    for (constraint, _), output in zip(asked, outputs, strict=True):
        [completion] = output.outputs
        if completion.finish_reason == "length":
            continue
        if "json" in constraint:
            jsonschema.validate(json.loads(completion.text), PERSON)
        elif "regex" in constraint:
            assert re.fullmatch(constraint["regex"], completion.text)
        elif "choice" in constraint:
            assert completion.text in constraint["choice"]
        else:
            assert isinstance(json.loads(completion.text), dict)
    assert sum(output.outputs[0].finish_reason == "stop" for output in outputs) >= 9


def test_structured_requests_among_others_say_what_they_say_alone(llm):
    """n completions, penalties, logprobs and plain requests in one batch. Forced tokens have logprobs, too."""
    structured = {"structured_outputs": {"json": PERSON}, "max_tokens": 120}
    params = [
        SamplingParams(temperature=1.0, seed=1, n=3, **structured),
        SamplingParams(temperature=1.0, seed=2, logprobs=2, **structured),
        SamplingParams(temperature=0.8, seed=3, max_tokens=60, min_tokens=60),
        SamplingParams(temperature=1.0, seed=2, **structured),
        SamplingParams(temperature=1.0, seed=4, repetition_penalty=1.3, **structured),
        SamplingParams(temperature=0.0, max_tokens=30, logprobs=1),
    ]
    together = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    for one, output in zip(params, together, strict=True):
        [alone] = llm.generate(PROMPT, one, use_tqdm=False)
        assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in output.outputs]
        assert [c.text for c in alone.outputs] == [c.text for c in output.outputs]
    with_logprobs, without = together[1].outputs[0], together[3].outputs[0]
    assert with_logprobs.token_ids == without.token_ids
    assert with_logprobs.logprobs is not None
    assert len(with_logprobs.logprobs) == len(with_logprobs.token_ids)


def test_a_stop_string_within_forced_tokens_ends_the_text_at_its_token(llm):
    params = SamplingParams(temperature=0, structured_outputs={"json": PERSON}, max_tokens=100, stop=["vouri"])
    [taken_ahead] = llm.generate(PROMPT, params, use_tqdm=False)
    [one_by_one] = llm.generate(PROMPT, params.clone(logprobs=0), use_tqdm=False)
    taken, drawn = taken_ahead.outputs[0], one_by_one.outputs[0]
    assert taken.text.endswith('"fa')
    assert (taken.text, taken.token_ids, taken.stop_reason) == (drawn.text, drawn.token_ids, "vouri")


def test_a_text_that_can_grow_no_longer_ends_below_min_tokens(llm):
    for logprobs in (None, 0):
        params = SamplingParams(min_tokens=10, logprobs=logprobs, structured_outputs={"regex": "abc"})
        [output] = llm.generate(PROMPT, params, use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abc", "stop")


def test_max_tokens_cuts_a_forced_stretch(llm):
    for max_tokens in range(1, 5):
        params = SamplingParams(max_tokens=max_tokens, structured_outputs={"choice": ["abracadabra abracadabra"]})
        [output] = llm.generate(PROMPT, params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == max_tokens
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("bad", [{"regex": "("}, {"json": {"type": "objekt"}}, {"grammar": "start: nothing"}], ids=str)
def test_an_impossible_constraint_is_a_value_error_and_the_engine_goes_on(llm, bad):
    with pytest.raises(ValueError, match="structured_outputs: "):
        llm.generate(PROMPT, SamplingParams(structured_outputs=bad), use_tqdm=False)
    assert_nothing_is_left(llm.core)
    assert llm.generate(PROMPT, SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids
