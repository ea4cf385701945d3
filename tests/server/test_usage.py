"""`usage` counts what vLLM counts, and a stream counts what the same request counts without one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.server import Host, Service, eventually

TEXT = "Once upon a time there was a king, and"
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CASES: dict[str, dict[str, Any]] = {
    "one": {"max_tokens": 7, "ignore_eos": True},
    "several choices": {"max_tokens": 7, "ignore_eos": True, "n": 3, "temperature": 1, "seed": 1},
    "echo": {"max_tokens": 7, "ignore_eos": True, "echo": True},
    "the prompt alone": {"max_tokens": 0, "echo": True},
    "a stop string": {"max_tokens": 40, "stop": [" the"]},
    "several prompts": {"prompt": [TEXT, TEXT + " then", "He"], "max_tokens": 7, "ignore_eos": True},
    "token ids": {"prompt": [5, 6, 7], "max_tokens": 7, "return_token_ids": True},
    "a truncated prompt": {"max_tokens": 7, "truncate_prompt_tokens": 3},
}


def counts(usage: dict[str, Any]) -> tuple[int, int]:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize("name", CASES)
def test_a_stream_has_the_usage_of_the_whole_answer(server: Service, offline, name):
    fields = {"prompt": TEXT, **CASES[name]}
    whole = server.complete(**fields)
    *_, last = server.complete(**fields, **WITH_USAGE)
    assert counts(last["usage"]) == counts(whole["usage"])
    tokenizer = offline.get_tokenizer()
    prompts = fields["prompt"] if name == "several prompts" else [fields["prompt"]]
    lengths = [len(tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt) for prompt in prompts]
    prompt_tokens = sum(min(length, fields.get("truncate_prompt_tokens", length)) for length in lengths)
    assert counts(whole["usage"])[0] == prompt_tokens  # once each, whatever n is, and echoed or not
    if fields.get("ignore_eos") or not fields["max_tokens"]:
        generated = fields["max_tokens"] * fields.get("n", 1) * len(prompts)
        assert counts(whole["usage"])[1] == generated
    if "return_token_ids" in fields:
        assert counts(whole["usage"])[1] == len(whole["choices"][0]["token_ids"])


def test_the_tokens_of_a_stop_string_count(server: Service, offline):
    answer = server.complete(TEXT, max_tokens=40, stop=[" the"], return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["stop_reason"] == " the"
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert " the" in offline.get_tokenizer().decode(choice["token_ids"])


def test_cached_tokens_are_those_of_the_prompts(server: Service):
    prompt = list(range(100, 165))  # four blocks and a token
    for cached in (0, 64):
        answer = server.complete(prompt, max_tokens=2, cache_salt="usage", n=2, temperature=1)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    *_, last = server.complete(prompt, max_tokens=2, cache_salt="usage", **WITH_USAGE)
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}
    twice = server.complete([prompt, prompt], max_tokens=2, cache_salt="usage")
    assert twice["usage"]["prompt_tokens_details"] == {"cached_tokens": 128}


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_request_counts_the_tokens_that_it_has(host: Host, server: Service, stream):
    options = WITH_USAGE if stream else {}
    fields = {"max_tokens": 1900, "n": 2, "temperature": 1, "ignore_eos": True, "return_token_ids": True, **options}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.complete, TEXT, request_id=f"aborted-{stream}", **fields)
        eventually(lambda: host.llm.client.stats.num_running == 2)
        eventually(lambda: server.post("/abort_requests", {"request_ids": [f"aborted-{stream}"]}).json["aborted"])
        answer = running.result()
    answers = answer if stream else [answer]
    choices = [choice for part in answers for choice in part["choices"]]
    assert {choice["finish_reason"] for choice in choices if choice["finish_reason"]} == {"abort"}
    used = answers[-1]["usage"]["completion_tokens"]
    assert used == sum(len(choice["token_ids"] or ()) for choice in choices)
    assert used < 2 * 1900
