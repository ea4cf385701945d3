"""/v1/completions: prompts in every form, what is returned, streamed and not, against the same model offline."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.messages.sampling_params import SamplingParams

TEXT = "Once upon a time"
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def offline_texts(offline, prompts, params=GREEDY):
    return [c.text for output in offline.generate(prompts, params, use_tqdm=False) for c in output.outputs]


def texts_of(answer):
    """By index, of an answer or of a stream's events."""
    if isinstance(answer, dict):
        return [choice["text"] for choice in answer["choices"]]
    texts = {}
    for event in answer:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return [texts[index] for index in range(len(texts))]


def ends_of(events):
    choices = [choice for event in events for choice in event["choices"]]
    return {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}


# ---- text


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_every_form_say_what_the_offline_engine_says(server, offline, stream):
    ids = offline.get_tokenizer().encode(TEXT)
    [text] = offline_texts(offline, [TEXT])
    for prompt, count in ((TEXT, 1), (ids, 1), ([TEXT, TEXT], 2), ([ids, ids, ids], 3)):
        assert texts_of(server.complete(prompt, max_tokens=24, stream=stream)) == [text] * count


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_their_choices_in_order(server, offline, stream):
    prompts = [TEXT, "The king", "A small dog", "In the forest"]
    answer = server.complete(prompts, max_tokens=24, stream=stream)
    assert texts_of(answer) == offline_texts(offline, prompts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_seeded_request_for_n_choices_says_what_the_offline_engine_says(server, offline, stream):
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, seed=7, n=3, max_tokens=20)
    fields = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "seed": 7, "n": 3, "max_tokens": 20}
    prompts = [TEXT, "The king"]
    answer = server.complete(prompts, **fields, stream=stream)
    assert texts_of(answer) == offline_texts(offline, prompts, params)
    if stream:
        assert ends_of(answer).keys() == set(range(6))


def test_a_stream_has_one_choice_an_event_and_one_id(server):
    events = server.complete(TEXT, max_tokens=8, n=2, temperature=1, stream=True)
    assert all(len(event["choices"]) == 1 for event in events)
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "text_completion" for event in events)
    assert all("usage" not in event for event in events)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stream", [False, True])
def test_all_sampling_parameters_mean_what_they_mean_offline(server, offline, stream):
    tokenizer = offline.get_tokenizer()
    there = tokenizer.encode(" there", add_special_tokens=False)[0]
    cases = [
        {"logit_bias": {str(there): -100}},
        {"allowed_token_ids": [there, 300, 301, 302]},
        {"bad_words": ["was"]},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"stop": ["king", "."], "include_stop_str_in_output": True},
        {"stop": "was"},
        {"stop_token_ids": [there]},
        {"min_tokens": 5, "stop": ["there"], "ignore_eos": True},
        {"truncate_prompt_tokens": 2},
        {"truncate_prompt_tokens": 2, "truncation_side": "left"},
        {"truncate_prompt_tokens": 2, "truncation_side": "right"},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    ]
    for case in cases:
        bias = case.get("logit_bias")
        params = SamplingParams(
            **{"temperature": 0, "max_tokens": 16, **case, "logit_bias": bias and {int(k): v for k, v in bias.items()}}
        )
        answer = server.complete(TEXT, max_tokens=16, **case, stream=stream)
        assert texts_of(answer) == offline_texts(offline, [TEXT], params), case


def test_null_is_as_if_left_out(server):
    nulls = dict.fromkeys("top_p top_k seed stop logit_bias logprobs n echo stream max_tokens suffix".split())
    assert texts_of(server.complete(TEXT, **nulls)) == texts_of(server.complete(TEXT))


def test_strings_are_taken_for_numbers_and_booleans_as_in_vllm(server):
    written = {
        "temperature": "0.5",
        "top_p": "0.9",
        "top_k": "40",
        "seed": "3",
        "n": "2",
        "max_tokens": "5",
        "logprobs": 1.0,
        "ignore_eos": "true",
        "stop_token_ids": ["7"],
        "logit_bias": {"9": "-5"},
        "echo": 1,
        "min_tokens": 2.0,
    }
    meant = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 3,
        "n": 2,
        "max_tokens": 5,
        "logprobs": 1,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "logit_bias": {"9": -5},
        "echo": True,
        "min_tokens": 2,
    }
    assert server.complete(TEXT, **written)["choices"] == server.complete(TEXT, **meant)["choices"]
    events = server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 2, "stream": "yes"}).events
    assert len(events) >= 2


def test_max_tokens_is_16_if_left_out(server):
    assert server.complete(TEXT, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_the_default_of_max_tokens_is_less_where_the_context_ends(server):
    usage = server.complete([5] * 2040, ignore_eos=True)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2040, 8)


def test_a_prompt_truncated_to_what_fits_leaves_room_for_max_tokens(server):
    usage = server.complete([5] * 3000, truncate_prompt_tokens=-1, max_tokens=40, ignore_eos=True)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2008, 40)


def test_what_stopped_a_request_is_told(server):
    choice = server.complete(TEXT, stop=["was"])["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "was")
    [*_, last] = server.complete(TEXT, stop=["was"], stream=True)
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("stop", "was")
    assert server.complete(TEXT, max_tokens=3)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_output_that_repeats_itself_ends_if_asked_for(server, stream):
    detection = {"max_pattern_size": 3, "min_pattern_size": 3, "min_count": 2}
    fields = {"allowed_token_ids": [1000], "max_tokens": 30, "ignore_eos": True, "stream": stream}
    answer = server.complete(TEXT, repetition_detection=detection, return_token_ids=True, **fields)
    choices = [c for event in (answer if stream else [answer]) for c in event["choices"]]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("repetition", "repetition_detected")
    assert sum(len(choice["token_ids"]) for choice in choices) == 6


def test_a_stream_interval_gathers_tokens_in_events(server):
    fields = {"max_tokens": 20, "ignore_eos": True, "stream": True, "return_token_ids": True}
    events = server.complete(TEXT, stream_interval=8, **fields)
    counts = [len(event["choices"][0]["token_ids"]) for event in events]
    assert (counts[0], sum(counts)) == (1, 20)
    assert all(count >= 8 for count in counts[1:-1])
    assert texts_of(events) == texts_of(server.complete(TEXT, **fields))


# ---- echo, logprobs, token ids


@pytest.mark.parametrize("stream", [False, True])
def test_echo_begins_with_the_prompt(server, offline, stream):
    ids = offline.get_tokenizer().encode(TEXT)
    [text] = offline_texts(offline, [TEXT])
    for prompt in (TEXT, ids):
        assert texts_of(server.complete(prompt, max_tokens=24, echo=True, stream=stream)) == [TEXT + text]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_tokens_is_the_prompt_alone(server, stream):
    answer = server.complete([TEXT, "The king"], max_tokens=0, echo=True, stream=stream)
    assert texts_of(answer) == [TEXT, "The king"]
    if stream:
        assert ends_of(answer) == {0: "length", 1: "length"}
    else:
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
        assert answer["usage"]["completion_tokens"] == 0


def logprobs_of(answer):
    merged = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for event in answer if isinstance(answer, list) else [answer]:
        for choice in event["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                merged[name] += values
    return merged


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_the_offline_engine(server, offline, stream):
    [output] = offline.generate([TEXT], GREEDY.clone(logprobs=3, max_tokens=6), use_tqdm=False)
    made = logprobs_of(server.complete(TEXT, max_tokens=6, logprobs=3, stream=stream))
    [completion] = output.outputs
    expected = [place[token] for token, place in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert made["tokens"] == [logprob.decoded_token for logprob in expected]
    assert made["token_logprobs"] == pytest.approx([logprob.logprob for logprob in expected], abs=1e-4)
    assert made["text_offset"] == [len("".join(made["tokens"][:at])) for at in range(6)]
    for top, place in zip(made["top_logprobs"], completion.logprobs, strict=True):
        assert top == pytest.approx({v.decoded_token: v.logprob for v in place.values()}, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_named_tokens_stand_in_place_of_the_likeliest(server, offline, stream):
    named = [1000, 20, 300]
    params = GREEDY.clone(max_tokens=3, logprob_token_ids=named)
    [output] = offline.generate([TEXT], params, use_tqdm=False)
    fields = {"logprobs": 1, "logprob_token_ids": named, "return_tokens_as_token_ids": True}
    made = logprobs_of(server.complete(TEXT, max_tokens=3, **fields, stream=stream))
    for top, place in zip(made["top_logprobs"], output.outputs[0].logprobs, strict=True):
        assert top == pytest.approx({f"token_id:{token}": value.logprob for token, value in place.items()}, abs=1e-4)
        assert len(top) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_has_those_of_the_prompt_too(server, offline, stream):
    answer = server.complete(TEXT, max_tokens=2, logprobs=1, echo=True, stream=stream)
    made = logprobs_of(answer)
    tokens = offline.get_tokenizer().encode(TEXT)
    assert len(made["tokens"]) == len(tokens) + 2
    assert "".join(made["tokens"]) == texts_of(answer)[0]
    assert made["token_logprobs"][0] is made["top_logprobs"][0] is None
    [output] = offline.generate([TEXT], GREEDY.clone(prompt_logprobs=1, max_tokens=1), use_tqdm=False)
    expected = [place[token].logprob for token, place in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]
    assert made["token_logprobs"][1 : len(tokens)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_name_token_ids(server, offline, stream):
    answer = server.complete(TEXT, max_tokens=1, prompt_logprobs=2, stream=stream)
    first = (answer[0] if stream else answer)["choices"][0]["prompt_logprobs"]
    tokens = offline.get_tokenizer().encode(TEXT)
    assert first[0] is None
    for token, place in zip(tokens[1:], first[1:], strict=True):
        assert len(place) in (2, 3)
        assert set(place[str(token)]) == {"logprob", "rank", "decoded_token"}


def test_zero_logprobs_are_those_of_the_tokens_alone(server):
    made = logprobs_of(server.complete(TEXT, max_tokens=4, logprobs=0))
    assert [list(top) for top in made["top_logprobs"]] == [[token] for token in made["tokens"]]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_if_asked_for(server, offline, stream):
    [output] = offline.generate([TEXT], GREEDY, use_tqdm=False)
    fields = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 0}
    answer = server.complete(TEXT, max_tokens=24, **fields, stream=stream)
    choices = [c for event in (answer if stream else [answer]) for c in event["choices"]]
    assert choices[0]["prompt_token_ids"] == output.prompt_token_ids
    made = [token for choice in choices for token in choice["token_ids"]]
    assert made == output.outputs[0].token_ids
    assert logprobs_of(answer)["tokens"] == [f"token_id:{token}" for token in made]


# ---- usage


def test_usage_counts_all_prompts_and_choices(server, offline):
    prompts = [TEXT, "The king of the hill"]
    count = sum(len(offline.get_tokenizer().encode(prompt)) for prompt in prompts)
    fields = {"n": 2, "temperature": 1, "max_tokens": 5, "ignore_eos": True}
    usage = server.complete(prompts, **fields)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (count, 20, count + 20)
    [*events, last] = server.complete(prompts, **fields, stream=True, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == count + 20
    assert all(event["usage"] is None for event in events)


def test_the_likeliest_of_several_completions_are_returned(server):
    fields = {"max_tokens": 8, "temperature": 1, "seed": 5, "ignore_eos": True}
    all_of_them = server.complete(TEXT, n=6, logprobs=0, **fields)["choices"]
    likelihood = [sum(choice["logprobs"]["token_logprobs"]) for choice in all_of_them]
    best = sorted(range(6), key=lambda index: -likelihood[index])[:2]
    answer = server.complete(TEXT, n=2, best_of=6, **fields)
    assert [choice["text"] for choice in answer["choices"]] == [all_of_them[index]["text"] for index in best]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 6 * 8
    assert server.complete(TEXT, n=2, best_of=2, stream=True, **fields)
    for wrong in ({"best_of": 1, "n": 2}, {"best_of": 3, "stream": True}):
        refused = server.post("/v1/completions", {"prompt": TEXT, **fields, **wrong})
        assert (refused.status, refused.error["param"]) == (400, "best_of")


def test_continuous_usage_grows(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.complete(TEXT, max_tokens=5, stream=True, stream_options=options, ignore_eos=True)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_cached_tokens_are_told_and_a_salt_keeps_prefixes_apart(server):
    prompt = "It was a very long day for all of the animals in the wood, since the rain did not stop. " * 3

    def cached(**fields):
        return server.complete(prompt, max_tokens=1, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0
    assert cached() > 16
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 16
    assert server.post("/reset_prefix_cache", {}).status == 200
    assert cached() == 0


def test_requests_at_once_say_what_they_say_alone(server, host, offline):
    prompts = [f"{TEXT} there was a {animal} number {n}" for n in range(32) for animal in ("dog", "cat", "king")]
    expected = offline_texts(offline, prompts)
    with ThreadPoolExecutor(96) as pool:
        answers = list(pool.map(lambda p: server.complete(p, max_tokens=24, stream=len(p) % 2 == 0), prompts))
    assert [texts_of(answer)[0] for answer in answers] == expected
    assert host.is_idle


def test_a_model_that_generates_makes_no_embeddings(server):
    answer = server.post("/v1/embeddings", {"input": "a"})
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert "--runner pooling" in answer.error["message"]
