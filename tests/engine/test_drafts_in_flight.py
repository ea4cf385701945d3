"""Drafters with two steps in flight: a step is scheduled before it is known how many drafts the last one accepted."""

from __future__ import annotations

from typing import Any

import pytest

from quire.messages.sampling_params import SamplingParams
from quire.messages.structured_outputs import StructuredOutputsParams
from support.checkpoints import Checkpoints
from support.engines import generate, make_llm, tokens_of
from support.late_device import run_late
from support.reference import References

TIGHT = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 24, "max_num_seqs": 12}


def draft_model(checkpoints: Checkpoints, model: str, most: int = 4) -> dict[str, Any]:
    found = {"method": "draft_model", "model": str(checkpoints.path(model)), "num_speculative_tokens": most}
    return {**found, "adaptive": False}


def params(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=0.9 * (i % 2),
            seed=i,
            max_tokens=20 + i,
            ignore_eos=bool(i % 3),
            top_k=20 * (i % 4 == 1),
            logprobs=2 if i % 5 == 0 else None,
            presence_penalty=0.5 * (i % 3 == 1),
        )
        for i in range(count)
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        pytest.param("llama", TIGHT, id="llama-tight"),
        pytest.param("olmo2", {}, id="olmo2-roomy", marks=pytest.mark.slow),
        pytest.param("llama", {}, id="llama-roomy", marks=pytest.mark.sampled(6)),
        pytest.param("olmo2", TIGHT, id="olmo2-tight", marks=pytest.mark.sampled(6)),
    ],
)
def test_a_late_device_with_two_steps_in_flight_says_the_same(
    checkpoints: Checkpoints, references: References, options: dict[str, Any], drafter: str
):
    """The draft model is the model itself, whose guesses are right, or another one, whose guesses are wrong."""
    prompts = [continuation.prompt for continuation in references.continuations("llama")[:10]]
    expected = generate(make_llm(checkpoints.path("llama")), prompts, params(10))
    llm = make_llm(checkpoints.path("llama"), speculative_config=draft_model(checkpoints, drafter), **options)
    late = run_late(llm, 2)
    assert tokens_of(generate(llm, prompts, params(10))) == tokens_of(expected)
    stats = llm.core.stats.speculation
    assert stats is not None
    assert late.most_in_flight == 2
    assert stats.draft_tokens > 100
    if drafter == "llama":
        assert stats.accepted_tokens > 0.6 * stats.draft_tokens  # penalties are unknown to the draft model


def test_captured_steps_with_drafts_say_the_same(checkpoints: Checkpoints, references: References):
    prompts = [continuation.prompt for continuation in references.continuations("llama")[:5]]
    params = [SamplingParams(temperature=0, max_tokens=20 + i, ignore_eos=True) for i in range(5)]
    expected = generate(make_llm(checkpoints.path("llama")), prompts, params)
    config = draft_model(checkpoints, "llama", 3)
    llm = make_llm(checkpoints.path("llama"), speculative_config=config, max_num_seqs=8, max_num_batched_tokens=64)
    late = run_late(llm, 2, captured=True)
    sizes = []
    fit = late.runner.forward.fit
    late.runner.forward.fit = lambda size: (sizes.append(fit(size)), sizes[-1])[1]
    assert tokens_of(generate(llm, prompts, params)) == tokens_of(expected)
    assert {4} <= {size.tokens_per_request for size in sizes}
    assert all(size.requests in (1, 2, 4, 8) for size in sizes)


def test_requests_with_a_grammar_get_no_drafts_beside_others_that_do(checkpoints: Checkpoints):
    grammar = StructuredOutputsParams(regex="(ab|cd|e[0-9]){3,9}")
    params = [
        SamplingParams(
            temperature=0, max_tokens=24, ignore_eos=not i % 2, structured_outputs=grammar if i % 2 else None
        )
        for i in range(6)
    ]
    prompts = [[5 + i, 9, 40, 7] for i in range(6)]
    expected = generate(make_llm(checkpoints.path("llama")), prompts, params)
    llm = make_llm(
        checkpoints.path("llama"), speculative_config=draft_model(checkpoints, "llama"), async_scheduling=True
    )
    assert tokens_of(generate(llm, prompts, params)) == tokens_of(expected)
    stats = llm.core.stats.speculation
    assert stats is not None
    assert stats.accepted_tokens == stats.draft_tokens > 0
