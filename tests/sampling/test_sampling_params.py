"""SamplingParams: every range, with vLLM's messages; and what they are turned into."""

from __future__ import annotations

import msgspec
import pytest

from quire.messages.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, r"n must be at least 1, got 0\."),
        ({"n": 2, "temperature": 0}, r"n must be 1 when using greedy sampling, got 2\."),
        ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\], got 2.1\."),
        ({"presence_penalty": NAN}, r"presence_penalty must be in \[-2, 2\]"),
        ({"frequency_penalty": -2.1}, r"frequency_penalty must be in \[-2, 2\], got -2.1\."),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be greater than zero, got 0.0\."),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be greater than zero"),
        ({"repetition_penalty": INF}, "repetition_penalty must be a finite number, got inf"),
        ({"repetition_penalty": NAN}, "repetition_penalty must be a finite number, got nan"),
        ({"logprobs": -2}, r"logprobs must be non-negative or -1, got -2\."),
        ({"prompt_logprobs": -2}, r"prompt_logprobs must be non-negative or -1, got -2\."),
        ({"truncate_prompt_tokens": 0}, r"truncate_prompt_tokens must be -1 or at least 1, got 0\."),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be -1 or at least 1"),
        ({"logprob_token_ids": []}, r"logprob_token_ids must hold 1 to 128 token ids, got 0\."),
        ({"logprob_token_ids": [1] * 129}, r"logprob_token_ids must hold 1 to 128 token ids, got 129\."),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, r"logprobs must equal len\(logprob_token_ids\)=2.*, got 3\."),
        ({"stream_interval": 0}, r"stream_interval must be at least 1, got 0\."),
        ({"repetition_detection": {"max_pattern_size": -1}}, "repetition_detection: max_pattern_size and min_pattern"),
        ({"repetition_detection": {"max_pattern_size": 1001, "min_count": 2}}, "at most 1000"),
        ({"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3}}, "min_pattern_size <= max_pattern"),
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 1}}, r"min_count must be at least 2, got 1\."),
        ({"repetition_detection": {"size": 2}}, "unknown field `size`"),
        ({"truncation_side": "middle"}, "truncation_side must be 'left' or 'right', got 'middle'"),
        ({"logit_bias": {5: NAN}}, "logit_bias of token 5 must be a number"),
        ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty!"),
        ({"bad_words": ["a", ""]}, r"bad_words cannot contain an empty string\. Got bad_words=\['a', ''\]"),
        ({"structured_outputs": {}}, "must use one kind of structured outputs constraint but none"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "but multiple are specified: .'json', 'regex'."),
        ({"structured_outputs": {"guided": "a"}}, "structured_outputs has no field 'guided'"),
        ({"temperature": -0.1}, r"temperature must be non-negative.*, got -0.1\."),
        ({"temperature": INF}, "temperature must be non-negative and finite"),
        ({"temperature": NAN}, "temperature must be non-negative and finite"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0\."),
        ({"top_p": 1.01}, r"top_p must be in \(0, 1\], got 1.01\."),
        ({"top_p": NAN}, r"top_p must be in \(0, 1\]"),
        ({"top_k": -2}, r"top_k must be 0 \(disable\), or at least 1, got -2\."),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0.1\."),
        ({"min_p": 1.1}, r"min_p must be in \[0, 1\], got 1.1\."),
        ({"min_p": NAN}, r"min_p must be in \[0, 1\]"),
        ({"max_tokens": 0}, r"max_tokens must be at least 1, got 0\."),
        ({"min_tokens": -1}, r"min_tokens must be greater than or equal to 0, got -1\."),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens must be less than or equal to max_tokens=4, got 5\."),
        ({"seed": 2**63}, "seed must fit in 64 bits"),
        ({"seed": -(2**63) - 1}, "seed must fit in 64 bits"),
        ({"stop": ""}, r"stop cannot contain an empty string\."),
        ({"stop": ["a", ""]}, r"stop cannot contain an empty string\."),
        ({"stop": "a", "detokenize": False}, r"stop strings are only supported when detokenize is True"),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_an_error_that_names_it(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 1.5}, "n must be an integer, got float"),
        ({"n": True}, "n must be an integer, got bool"),
        ({"top_k": 2.0}, "top_k must be an integer, got float"),
        ({"max_tokens": "5"}, "max_tokens must be an integer, got str"),
        ({"seed": 1.0}, "seed must be an integer, got float"),
        ({"min_tokens": None}, "min_tokens must be an integer, got NoneType"),
        ({"temperature": "hot"}, "temperature must be a number, got str"),
        ({"top_p": None}, "top_p must be a number, got NoneType"),
        ({"min_p": True}, "min_p must be a number, got bool"),
        ({"presence_penalty": "much"}, "presence_penalty must be a number, got str"),
        ({"repetition_penalty": None}, "repetition_penalty must be a number, got NoneType"),
        ({"logprobs": 1.0}, "logprobs must be an integer, got float"),
        ({"prompt_logprobs": "all"}, "prompt_logprobs must be an integer, got str"),
        ({"truncate_prompt_tokens": True}, "truncate_prompt_tokens must be an integer, got bool"),
        ({"stream_interval": 1.5}, "stream_interval must be an integer, got float"),
        ({"logprob_token_ids": [1.5]}, r"logprob_token_ids must contain only integers, got \[1.5\]"),
        ({"repetition_detection": 5}, "repetition_detection must be RepetitionDetectionParams, got int"),
        ({"detokenize": 1}, "detokenize must be True or False, got 1"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"output_kind": 1}, "output_kind must be a RequestOutputKind, got 1"),
        ({"logit_bias": [5]}, "logit_bias must be a dict, got list"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias must map integer token ids to numbers, got '5': 1.0"),
        ({"logit_bias": {5: "much"}}, "logit_bias must map integer token ids to numbers, got 5: 'much'"),
        ({"allowed_token_ids": [1.0]}, r"allowed_token_ids must contain only integers, got \[1.0\]"),
        ({"bad_words": [b"x"]}, "bad_words must be a list of strings"),
        ({"bad_words": "no"}, "bad_words must be a list of strings, got 'no'"),
        ({"extra_args": "x"}, "extra_args must be a dict, got str"),
        ({"logits_processors": ["my.module:f"]}, "logits_processors must contain only functions"),
        ({"stop": [1]}, "stop must be a string or a list of strings"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must contain only integers"),
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_an_error_that_names_it(options, message):
    with pytest.raises(TypeError, match=message):
        SamplingParams(**options)


def test_the_borders_of_the_ranges_are_allowed():
    SamplingParams(n=1, temperature=0, top_p=1, top_k=-1, min_p=0, max_tokens=1, min_tokens=0, seed=-(2**63))
    SamplingParams(temperature=100, top_p=1e-9, top_k=10**9, min_p=1, max_tokens=None, min_tokens=10**6, seed=2**63 - 1)
    SamplingParams(min_tokens=4, max_tokens=4, stop=[], stop_token_ids=[], logprobs=None, bad_words=[])
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=1e-3, logprobs=0, prompt_logprobs=-1)
    SamplingParams(logit_bias={}, allowed_token_ids=[0], truncate_prompt_tokens=-1, extra_args={}, logits_processors=[])


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.ignore_eos) == (16, 0, None, False)
    assert (params.detokenize, params.skip_special_tokens, params.include_stop_str_in_output) == (True, True, False)


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="end").stop_strings == ["end"]
    assert SamplingParams(stop=("a", "b")).stop_strings == ["a", "b"]
    assert SamplingParams().stop_strings == []


def test_a_temperature_of_nearly_zero_is_greedy_and_greedy_needs_no_truncation():
    params = SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.1)
    assert params.greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert not SamplingParams(temperature=1e-4).greedy


def test_a_clone_is_checked_and_its_source_stays_as_it_was():
    params = SamplingParams(seed=1)
    assert params.clone(seed=2).seed == 2
    assert params.seed == 1
    with pytest.raises(ValueError, match="top_p"):
        params.clone(top_p=2.0)


def test_true_asks_for_one_logprob():
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (params.logprobs, params.prompt_logprobs) == (1, 1)


def test_a_request_with_prompt_logprobs_does_not_read_the_prefix_cache():
    assert SamplingParams(logprobs=1).reads_prefix_cache
    assert not SamplingParams(prompt_logprobs=0).reads_prefix_cache
    assert not SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False).reads_prefix_cache
    assert not SamplingParams(skip_reading_prefix_cache=True).reads_prefix_cache


def test_they_travel_as_msgpack():
    params = SamplingParams(
        n=3,
        temperature=0.5,
        top_k=4,
        stop=["a"],
        stop_token_ids=[7],
        seed=-5,
        max_tokens=None,
        logit_bias={3: -1.5},
        bad_words=["x"],
        output_kind=RequestOutputKind.DELTA,
        extra_args={"depth": [1, "two", None]},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0, "max_tokens": 1}, "beam_width must be at least 1, got 0"),
        ({"beam_width": 1, "max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"beam_width": 1, "max_tokens": 1, "length_penalty": NAN}, "length_penalty must be a finite number, got nan"),
    ],
    ids=str,
)
def test_parameters_of_a_beam_search_are_checked_too(options, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**options)
