"""What became of the drafts of each request, offline: vLLM's CompletionOutput.spec_decode_metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.messages.outputs import SpecDecodeMetrics
from support.checkpoints import Checkpoints
from support.engines import generate, make_llm

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7, 8], [9, 40, 7, 9, 40, 7, 9, 40], [11, 12, 13]]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "adaptive": False}


def test_the_fields_are_those_of_vllm():
    metrics = SpecDecodeMetrics(3, per_step=[])
    for num_drafts, num_accepted in ((3, 0), (3, 3), (2, 1), (3, 3), (1, 0)):
        metrics.verified(num_drafts, num_accepted)
    assert metrics.to_dict() == {
        "mean_acceptance_length": 1 + 7 / 5,
        "draft_acceptance_rate": 7 / 12,
        "acceptance_histogram": [2, 1, 0, 2],
        "acceptance_histogram_by_draft_length": {"1": [1, 0], "2": [0, 1, 0], "3": [1, 0, 0, 2]},
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 7,
        "num_draft_tokens": 12,
        "num_spec_tokens": 3,
        "per_step_accepted": [0, 3, 1, 3, 0],
        "per_step_drafted": [3, 3, 2, 3, 1],
    }


def test_a_request_without_drafts_has_zeros():
    expected = {"mean_acceptance_length": 1.0, "draft_acceptance_rate": 0.0, "acceptance_histogram": [0, 0, 0]}
    fields = SpecDecodeMetrics(2).to_dict()
    assert fields == {**fields, **expected, "num_spec_steps": 0}
    assert "per_step_accepted" not in fields


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_the_requests_together_have_the_engines_counts(checkpoints: Checkpoints, method: str):
    options: dict[str, Any] = NGRAM
    if method == "draft_model":
        options = {"model": str(checkpoints.path("llama")), "num_speculative_tokens": 3, "adaptive": False}
    params = [SamplingParams(max_tokens=30 + i, ignore_eos=True, temperature=0, n=1) for i in range(len(PROMPTS))]
    llm = make_llm(checkpoints.path("llama"), speculative_config=options, per_request_spec_decode_metrics="detailed")
    found = [output.outputs[0].spec_decode_metrics for output in generate(llm, PROMPTS, params)]
    stats, fields = llm.core.stats.speculation, [metrics.to_dict() for metrics in found if metrics is not None]
    assert stats is not None
    assert len(fields) == len(PROMPTS)
    assert 0 < stats.draft_tokens == sum(field["num_draft_tokens"] for field in fields)
    assert stats.drafts == sum(field["num_spec_steps"] for field in fields)
    assert stats.accepted_tokens == sum(field["num_accepted_draft_tokens"] for field in fields)
    steps = [list(zip(f["per_step_drafted"], f["per_step_accepted"], strict=True)) for f in fields]
    for position, accepted in enumerate(stats.accepted_at):
        assert accepted == sum(step_accepted > position for request in steps for _, step_accepted in request)
    for request, field in zip(steps, fields, strict=True):
        counted = Counter(accepted for _, accepted in request)
        assert field["acceptance_histogram"] == [counted[i] for i in range(options["num_speculative_tokens"] + 1)]


def test_each_completion_has_its_own(checkpoints: Checkpoints):
    itself = {"model": str(checkpoints.path("llama")), "num_speculative_tokens": 3, "adaptive": False}
    llm = make_llm(checkpoints.path("llama"), speculative_config=itself)
    [output] = generate(llm, PROMPTS[:1], SamplingParams(max_tokens=41, ignore_eos=True, temperature=0.7, n=3, seed=1))
    found = [completion.spec_decode_metrics for completion in output.outputs]
    assert len({id(metrics) for metrics in found}) == 3
    for metrics in found:  # the prompt gives one token, and ten verifications four each
        assert metrics is not None
        assert metrics.per_step is None
        assert metrics.to_dict()["acceptance_histogram"] == [0, 0, 0, 10]
        assert metrics.to_dict()["mean_acceptance_length"] == 4


def test_without_speculation_there_is_none(checkpoints: Checkpoints):
    llm: LLM = make_llm(checkpoints.path("llama"), per_request_spec_decode_metrics="detailed")
    [output] = generate(llm, PROMPTS[:1], SamplingParams(max_tokens=3))
    assert output.outputs[0].spec_decode_metrics is None
