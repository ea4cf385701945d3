"""Speculation never changes an answer: whatever is proposed, requests say what they say without it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from support.checkpoints import Checkpoints
from support.engines import GREEDY, generate, make_llm, tokens_of
from support.late_device import run_late
from support.proposers import PROPOSERS, Perfect, speculate
from support.reference import References
from support.requests import requests, said, with_grammars

VARIANTS = ["llama", "qwen3-mixed-windows-biases"]
TIGHT = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 24, "max_num_seqs": 12}

each_proposer = pytest.mark.parametrize("proposer", PROPOSERS)
each_variant = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(scope="module", params=VARIANTS)
def plain(request: pytest.FixtureRequest, checkpoints: Checkpoints, references: References) -> tuple[Any, ...]:
    """A variant, prompts, parameters, and what is said without speculation. Perfect proposers know it."""
    prompts = [continuation.prompt for continuation in references.continuations(request.param)[:20]]
    params = requests(len(prompts))
    return request.param, prompts, params, generate(make_llm(checkpoints.path(request.param)), prompts, params)


@pytest.mark.sampled(24)
@each_proposer
@pytest.mark.parametrize("options", [{}, TIGHT], ids=["roomy", "tight"])
def test_requests_of_all_kinds_say_the_same(checkpoints: Checkpoints, plain, proposer, options):
    variant, prompts, params, expected = plain
    Perfect.learn(expected)
    llm = make_llm(checkpoints.path(variant), speculative_config=speculate(proposer), **options)
    assert said(generate(llm, prompts, params)) == said(expected)
    stats = llm.core.stats.speculation
    assert stats is not None
    assert stats.draft_tokens > 0
    if proposer == "Perfect":
        assert stats.accepted_tokens > 0.8 * stats.draft_tokens
    assert sum(stats.accepted_at) == stats.accepted_tokens


@pytest.mark.sampled(12)
@each_proposer
@each_variant
def test_a_device_that_works_late_says_the_same(checkpoints: Checkpoints, references, variant, proposer):
    prompts = [continuation.prompt for continuation in references.continuations(variant)[:8]]
    expected = generate(make_llm(checkpoints.path(variant)), prompts)
    Perfect.learn(expected)
    llm = make_llm(checkpoints.path(variant), speculative_config=speculate(proposer))
    run_late(llm, 1)
    assert tokens_of(generate(llm, prompts)) == tokens_of(expected)
    assert llm.core.stats.speculation.draft_tokens


@pytest.mark.sampled(2)
@pytest.mark.parametrize("proposer", ["Perfect", "Mixed"])
def test_stop_strings_within_accepted_drafts_end_the_answer(checkpoints: Checkpoints, references, proposer):
    prompts = [continuation.prompt for continuation in references.continuations("llama")[:8]]
    expected = generate(make_llm(checkpoints.path("llama")), prompts)
    Perfect.learn(expected)
    stops = [output.outputs[0].text[9 + i : 12 + i] for i, output in enumerate(expected)]
    params = [GREEDY.clone(stop=stop) for stop in stops]
    llm = make_llm(checkpoints.path("llama"), speculative_config=speculate(proposer))
    for output, before, stop in zip(generate(llm, prompts, params), expected, stops, strict=True):
        assert output.outputs[0].text == before.outputs[0].text[: before.outputs[0].text.index(stop)]
        assert output.outputs[0].stop_reason == stop


def test_logits_processors_see_texts_with_drafts_that_are_rejected(checkpoints: Checkpoints):
    seen: list[tuple[int, ...]] = []

    def follow(output: list[int], logits: Tensor) -> Tensor:
        seen.append(tuple(output))
        logits[sum(output) % 300] += 3
        return logits

    params = GREEDY.clone(max_tokens=20, ignore_eos=True, logits_processors=[follow])
    said = []
    for options in ({}, {"speculative_config": speculate("Adversarial", 3)}):
        seen.clear()
        [tokens] = tokens_of(generate(make_llm(checkpoints.path("llama"), **options), [[5, 6, 7]], params))
        said.append(list(tokens))
        texts = {tuple(said[0][:i]) for i in range(20)}
        assert texts <= set(seen)
        assert (texts == set(seen)) == (not options)
    assert said[0] == said[1]


@pytest.mark.sampled(6)
@each_proposer
def test_drafts_keep_to_the_grammar(checkpoints: Checkpoints, proposer):
    params = with_grammars(8)
    prompts = [[5 + i, 9, 40, 7] for i in range(8)]
    expected = generate(make_llm(checkpoints.path("llama")), prompts, params)
    Perfect.learn(expected)
    llm = make_llm(checkpoints.path("llama"), speculative_config=speculate(proposer))
    assert said(generate(llm, prompts, params)) == said(expected)


@pytest.mark.parametrize("longest", [20, 29, 60])
def test_long_texts_get_no_drafts(checkpoints: Checkpoints, longest: int):
    """With perfect drafts, a text of 20 tokens grows to `longest` in steps of up to 5, and then by one token a step."""
    text = list(range(5, 25))
    params = GREEDY.clone(max_tokens=30, ignore_eos=True)
    expected = generate(make_llm(checkpoints.path("llama")), [text], params)
    Perfect.learn(expected)
    llm = make_llm(checkpoints.path("llama"), speculative_config={**speculate("Perfect", 4), "max_model_len": longest})
    assert tokens_of(generate(llm, [text], params)) == tokens_of(expected)
    stats = llm.core.stats.speculation
    assert stats is not None
    assert (stats.drafts == 0) == (longest == 20)
    assert stats.draft_tokens == stats.accepted_tokens <= longest - 20


def test_a_single_stream_takes_fewer_steps(checkpoints: Checkpoints):
    expected = generate(make_llm(checkpoints.path("llama")), [[5, 6, 7]])
    Perfect.learn(expected)
    llm = make_llm(checkpoints.path("llama"), speculative_config=speculate("Perfect", 7))
    generate(llm, [[5, 6, 7]])
    stats = llm.core.stats.speculation
    assert stats is not None
    assert stats.accepted_tokens == stats.draft_tokens
    assert stats.accepted_at[0] == stats.drafts
