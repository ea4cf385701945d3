"""use_beam_search in completions and chats, against the search of the offline engine."""

from __future__ import annotations

import pytest

from quire.messages.sampling_params import BeamSearchParams
from support.server import Host, Service, eventually

TEXT = "Once upon a time there was"
USER = {"role": "user", "content": "Tell me a story about a dog."}
BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 10, "temperature": 0}


def expected(offline, prompt: list[int], **fields) -> list[tuple[list[int], float]]:
    """(output tokens, log-probability) of the beams."""
    [found] = offline.beam_search([prompt], BeamSearchParams(beam_width=3, max_tokens=10, **fields))
    return [(beam.tokens[len(prompt) :], beam.cum_logprob) for beam in found.sequences]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_completions_are_the_beams_of_the_offline_engine(server: Service, offline, stream):
    prompts = [offline.get_tokenizer().encode(text) for text in (TEXT, "The cat")]
    answer = server.complete(prompts, **BEAMS, return_token_ids=True, logprobs=1, stream=stream)
    choices = [choice for event in (answer if stream else [answer]) for choice in event["choices"]]
    wanted = [beam for prompt in prompts for beam in expected(offline, prompt)]
    assert [choice["index"] for choice in choices] == list(range(6))
    for choice, (tokens, logprob) in zip(choices, wanted, strict=True):
        assert choice["token_ids"] == tokens
        assert choice["text"] == offline.get_tokenizer().decode(tokens, skip_special_tokens=True)
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(logprob, abs=1e-3)
        assert choice["finish_reason"] in ("stop", "length")
    if not stream:
        assert answer["usage"]["completion_tokens"] == sum(len(tokens) for tokens, _ in wanted)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chats_have_beams_and_their_length_counts(server: Service, offline, stream):
    prompt = server.post("/tokenize", {"messages": [USER]}).json["tokens"]
    for penalty in (0.0, 2.0):
        answer = server.chat(USER["content"], **BEAMS, length_penalty=penalty, stream=stream)
        texts = ["", "", ""]
        for event in answer if stream else [answer]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta" if stream else "message"].get("content") or ""
        beams = expected(offline, prompt, length_penalty=penalty)
        assert texts == [offline.get_tokenizer().decode(tokens, skip_special_tokens=True) for tokens, _ in beams]


def test_a_beam_that_ends_stops_before_its_end(server: Service):
    [best, *_] = server.chat("Hello", **{**BEAMS, "max_tokens": 60})["choices"]
    assert best["finish_reason"] == "stop"
    assert "<|im_end|>" not in best["message"]["content"]


def test_a_client_that_leaves_ends_the_search(server: Service, host: Host):
    body = {"prompt": TEXT, **BEAMS, "max_tokens": 1500, "ignore_eos": True}
    with server.connection("/v1/completions", body) as raw:
        eventually(lambda: not host.is_idle)
        raw.close()
    eventually(lambda: host.is_idle)
    assert server.get("/load").json == {"server_load": 0}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"n": 11}, "n"),
        ("completions", {"stop": ["a"]}, "stop"),
        ("completions", {"repetition_penalty": 1.1}, "repetition_penalty"),
        ("completions", {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("completions", {"echo": True, "logprobs": 1}, "echo"),
        ("completions", {"best_of": 5}, "best_of"),
        ("chat/completions", {"logprobs": True, "logprob_token_ids": [1]}, "logprob_token_ids"),
        ("chat/completions", {"tools": [{"function": {"name": "f"}}], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_beams_take_no_notice_of_is_refused(server: Service, host: Host, path, fields, param):
    prompt = {"prompt": TEXT} if path == "completions" else {"messages": [USER]}
    answer = server.post(f"/v1/{path}", {**prompt, **BEAMS, **fields})
    assert (answer.status, answer.error["param"]) == (400, param), answer.error
    assert host.is_idle


def test_neutral_values_are_accepted(server: Service):
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0, "stop": [], "response_format": {"type": "text"}}
    assert server.complete(TEXT, **{**BEAMS, "max_tokens": 2}, **neutral)["choices"]
