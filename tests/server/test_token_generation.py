"""POST /inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

from typing import Any

import pytest

from support.server import Answer, Host, Service, eventually

PATH = "/inference/v1/generate"


@pytest.fixture(scope="module")
def prompt(server: Service) -> list[int]:
    return server.post("/tokenize", {"prompt": "Once upon a time there was a"}).json["tokens"]


def generate(server: Service, prompt: list[int], *, sampling: dict[str, Any] | None = None, **fields: Any) -> Answer:
    sampling = {"temperature": 0, "max_tokens": 12} if sampling is None else sampling
    return server.post(PATH, {"token_ids": prompt, "sampling_params": sampling, **fields})


def test_tokens_are_those_of_completions_with_the_same_seed(server: Service, prompt: list[int]):
    for sampling in (
        {"temperature": 0, "max_tokens": 12},
        {"temperature": 1.3, "seed": 7, "max_tokens": 20, "top_p": 0.9, "n": 3},
        {"temperature": 1, "seed": 8, "max_tokens": 20, "repetition_penalty": 1.5, "min_tokens": 20},
    ):
        answer = generate(server, prompt, sampling=sampling, return_token_ids=True).json
        expected = server.complete(prompt, **sampling, return_token_ids=True)
        for choice, theirs in zip(answer["choices"], expected["choices"], strict=True):
            names = ("index", "token_ids", "finish_reason", "stop_reason")
            assert {name: choice[name] for name in names} == {name: theirs[name] for name in names}
        assert answer["prompt_token_ids"] == prompt
        assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]


def test_an_answer_has_every_key_of_vllms(server: Service, prompt: list[int]):
    answer = generate(server, prompt, request_id="mine", model="demo").json
    [choice] = answer.pop("choices")
    assert choice.keys() == {
        "index",
        "finish_reason",
        "stop_reason",
        "token_ids",
        "routed_experts",
        "sampling_mask",
        "weight_versions",
        "logprobs",
    }
    assert answer.pop("created") > 0
    assert answer.pop("usage")["total_tokens"] == len(prompt) + 12
    assert answer == {
        "request_id": "generate-tokens-mine",
        "model": "demo",
        "output_mode": "tokens",
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def test_a_stream_has_the_same_tokens_and_logprobs(server: Service, prompt: list[int]):
    sampling = {"temperature": 1, "seed": 3, "max_tokens": 15, "logprobs": 2, "n": 2}
    whole = generate(server, prompt, sampling=sampling).json
    usage = {"include_usage": True, "continuous_usage_stats": True}
    events = generate(
        server, prompt, sampling=sampling, stream=True, stream_options=usage, return_token_ids=True
    ).events
    assert [event.get("prompt_token_ids") for event in events] == [prompt] + [None] * (len(events) - 1)
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert {event["request_id"] for event in events} == {events[0]["request_id"]}
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        expected = whole["choices"][index]
        assert [token for choice in choices for token in choice["token_ids"]] == expected["token_ids"]
        assert [entry for choice in choices for entry in choice["logprobs"]["content"]] == expected["logprobs"][
            "content"
        ]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_logprobs_name_tokens_by_their_ids(server: Service, prompt: list[int]):
    sampling = {"temperature": 0, "max_tokens": 5, "logprobs": 3, "prompt_logprobs": 1}
    answer = generate(server, prompt, sampling=sampling).json
    [choice] = answer["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    for entry in content:
        top = entry.pop("top_logprobs")
        assert top[0] == entry
        assert [other["rank"] for other in top] == [1, 2, 3]
    expected = server.complete(prompt, max_tokens=5, logprobs=3, return_token_ids=True)["choices"][0]
    assert [entry["logprob"] for entry in content] == pytest.approx(expected["logprobs"]["token_logprobs"])
    assert answer["prompt_logprobs"][0] is None
    assert [str(token) in place for token, place in zip(prompt[1:], answer["prompt_logprobs"][1:], strict=True)]


def test_text_is_returned_where_it_is_asked_for(server: Service, prompt: list[int]):
    expected = server.complete(prompt, max_tokens=12)["choices"][0]["text"]
    sampling = {"temperature": 0, "max_tokens": 12, "logprobs": 1}
    [choice] = generate(server, prompt, sampling=sampling, output_mode="text").json["choices"]
    assert choice["text"] == expected
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == expected
    events = generate(server, prompt, sampling=sampling, output_mode="text", stream=True).events
    assert "".join(event["choices"][0]["text"] for event in events) == expected


def test_stop_strings_end_the_output_though_no_text_is_returned(server: Service, prompt: list[int]):
    text = server.complete(prompt, max_tokens=12)["choices"][0]["text"]
    stop = text.split()[2]
    sampling = {"temperature": 0, "max_tokens": 12, "stop": [stop]}
    [choice] = generate(server, prompt, sampling=sampling).json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert len(choice["token_ids"]) < 12


@pytest.mark.slow
def test_max_tokens_is_that_of_chats_unless_it_is_given(server: Service, prompt: list[int]):
    answer = generate(server, prompt, sampling={"temperature": 0, "ignore_eos": True}).json
    chat = server.chat("Hi", ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == chat["usage"]["completion_tokens"] > 16


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"token_ids": [1] * 5000}, "token_ids"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_tokens": 10**6}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"min_tokens": 9, "max_tokens": 2}}, "sampling_params.min_tokens"),
        ({"sampling_params": {"logprobs": 1000}}, "sampling_params.logprobs"),
        ({"sampling_params": {"logit_bias": {"1": 1000}}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"watermarking": True}}, "sampling_params.watermarking"),
        ({"sampling_params": {"structured_outputs": {"regex": "("}}}, "sampling_params.structured_outputs"),
        ({"features": {"mm_hashes": {"image": ["a"]}}}, "features"),
        ({"content_parts": [{"type": "image_url"}]}, "content_parts"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"output_mode": "speech"}, "output_mode"),
        ({"model": "other"}, "model"),
        ({"priority": 3}, "priority"),
    ],
)
def test_a_wrong_request_is_refused_with_the_path_of_the_field(
    server: Service, host: Host, fields: dict[str, Any], param: str
):
    answer = server.post(PATH, {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}, **fields})
    assert (answer.status, answer.error["param"]) == (404 if param == "model" else 400, param)
    assert host.is_idle


def test_all_default_values_of_vllms_sampling_params_are_accepted(server: Service, prompt: list[int]):
    sampling = {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
        "max_tokens": 4,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "output_kind": 0,
        "skip_clone": False,
        "output_text_buffer_length": 0,
        "structured_outputs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "extra_args": None,
        "bad_words": [],
        "flat_logprobs": False,
        "skip_reading_prefix_cache": None,
        "thinking_token_budget": None,
        "repetition_detection": None,
    }
    fields = {"features": None, "kv_transfer_params": None, "priority": 0, "stream": False, "cache_salt": "a"}
    assert len(generate(server, prompt, sampling=sampling, **fields).json["choices"][0]["token_ids"]) == 4


@pytest.mark.parametrize("fields", [{"n": [{}]}, {"temperature": "hot"}, {"stop": {"a": 1}}, {"logprobs": -7}])
def test_sampling_fields_outside_sampling_params_are_ignored(
    server: Service, prompt: list[int], fields: dict[str, Any]
):
    plain = generate(server, prompt, sampling={"max_tokens": 3, "temperature": 0}).json
    answer = generate(server, prompt, sampling={"max_tokens": 3, "temperature": 0}, **fields).json
    assert answer["choices"] == plain["choices"]


def test_a_client_that_leaves_ends_its_request(server: Service, host: Host, prompt: list[int]):
    body = {"token_ids": prompt, "sampling_params": {"ignore_eos": True, "max_tokens": 1500}, "stream": True}
    with server.connection(PATH, body) as connection:
        assert connection.recv(100)
    eventually(lambda: host.is_idle)
