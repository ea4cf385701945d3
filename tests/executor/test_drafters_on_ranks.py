"""Drafters on two ranks that share the model: they say what one rank says without a drafter."""

from __future__ import annotations

from typing import Any

import pytest

from quire.messages.sampling_params import SamplingParams
from support.checkpoints import Checkpoints
from support.drafters import Drafters
from support.engines import generate, make_llm, tokens_of
from support.reference import prompts

TIGHT = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 24, "max_num_seqs": 6}
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True) for i in range(9)]


@pytest.fixture(scope="module")
def drafters(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(checkpoints, tmp_path_factory)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(
            "similar", {"draft_tensor_parallel_size": 1}, id="each-rank-has-the-draft-model", marks=pytest.mark.nightly
        ),
        pytest.param(
            "similar", {"draft_tensor_parallel_size": 2}, id="ranks-share-the-draft-model", marks=pytest.mark.slow
        ),
        pytest.param("eagle3", {}, marks=pytest.mark.nightly),
        pytest.param("p-eagle", {"adaptive": True}, marks=pytest.mark.nightly),
        pytest.param("medusa", {}, marks=pytest.mark.nightly),
        pytest.param("mlp_speculator", {}, marks=pytest.mark.nightly),
    ],
)
def test_two_ranks_say_the_same(drafters: Drafters, kind: str, options: dict[str, Any]):
    texts, path = prompts(320, 9), drafters.target("llama")
    expected = tokens_of(generate(make_llm(path), texts, PARAMS))
    config = drafters.config(kind, "llama", **options)
    llm = make_llm(path, speculative_config=config, tensor_parallel_size=2, **TIGHT)
    try:
        assert tokens_of(generate(llm, texts, PARAMS)) == expected
        stats = llm.core.stats.speculation
        if not options.get("adaptive"):
            assert stats.draft_tokens > 100
        assert kind != "similar" or stats.accepted_tokens > 0.2 * stats.draft_tokens
    finally:
        llm.shutdown()
