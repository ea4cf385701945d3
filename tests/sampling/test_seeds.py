"""Given equal logits, nothing but the seed and the position decides what a seeded request says."""

from __future__ import annotations

import pytest

from quire.messages.sampling_params import SamplingParams
from support.checkpoints import Checkpoints
from support.engines import assert_preempted, generate, make_llm, tokens_of
from support.late_device import run_late
from support.reference import prompts

pytestmark = pytest.mark.texts

VARIANTS = ["llama", "qwen3-mixed-windows-biases"]
PARAMS = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, max_tokens=32, ignore_eos=True)


def seeded(count: int) -> list[SamplingParams]:
    """Of several kinds, so that a batch holds rows with and without each truncation, and greedy ones."""
    changes = [{}, {"top_k": 0}, {"top_p": 1.0, "min_p": 0.0}, {"temperature": 1.6}, {"temperature": 0}]
    return [PARAMS.clone(seed=1000 * i, **changes[i % len(changes)]) for i in range(count)]


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_seeded_request_says_the_same_however_it_is_run(checkpoints: Checkpoints, variant, backend):
    texts = prompts(320, 16 if backend == "cpu" else 9)
    params = seeded(len(texts))

    def llm(**options):
        return make_llm(checkpoints.path(variant), backend, **options)

    alone = llm()
    expected = [tokens_of(generate(alone, [text], [param]))[0] for text, param in zip(texts, params, strict=True)]
    assert len({tuple(token_ids) for token_ids in expected}) == len(texts)
    tiny = {"num_gpu_blocks_override": 22, "max_num_batched_tokens": 24, "max_num_seqs": 12}

    assert tokens_of(generate(llm(), texts, params)) == expected
    assert tokens_of(generate(llm(), texts[::-1], params[::-1])) == expected[::-1]
    assert tokens_of(generate(llm(max_num_batched_tokens=24, max_num_seqs=12), texts, params)) == expected
    warm = llm()
    generate(warm, texts, PARAMS.clone(max_tokens=1))
    assert tokens_of(generate(warm, texts, params)) == expected
    cramped = llm(**tiny)
    assert tokens_of(generate(cramped, texts, params)) == expected
    assert_preempted(cramped)
    for options in ({}, tiny):
        deep = llm(**options)
        run_late(deep)
        assert tokens_of(generate(deep, texts, params)) == expected


def test_another_seed_says_something_else(checkpoints: Checkpoints):
    llm = make_llm(checkpoints.path("llama"))
    params = [PARAMS.clone(seed=seed) for seed in (0, 1, 2, -1, 2**63 - 1, -(2**63), 2**32)]
    made = tokens_of(generate(llm, ["the same prompt"] * len(params), params))
    assert len({tuple(token_ids) for token_ids in made}) == len(params)


def test_seed_plus_i_wraps_around_at_the_largest_seed(checkpoints: Checkpoints):
    llm = make_llm(checkpoints.path("llama"))
    [output] = generate(llm, ["text"], PARAMS.clone(n=2, seed=2**63 - 1))
    [wrapped] = generate(llm, ["text"], PARAMS.clone(seed=-(2**63)))
    assert output.outputs[1].token_ids == wrapped.outputs[0].token_ids


def test_top_k_1_and_a_tiny_top_p_are_greedy(checkpoints: Checkpoints):
    llm = make_llm(checkpoints.path("llama"))
    greedy = PARAMS.clone(temperature=0)
    nearly = [PARAMS.clone(top_k=1), PARAMS.clone(top_p=1e-6), PARAMS.clone(min_p=1.0), PARAMS.clone(temperature=1e-4)]
    made = tokens_of(generate(llm, ["text"] * 5, [greedy, *nearly]))
    assert all(token_ids == made[0] for token_ids in made)
