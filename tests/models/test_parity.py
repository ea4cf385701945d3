"""Every architecture against transformers: the same logits. The greedy tokens are compared in test_matrix.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.checkpoints import ALL_VARIANTS
from support.engines import MAX_MODEL_LEN, assert_preempted, make_llm, teacher_forced_logits
from support.reference import LENGTHS, NUM_TOKENS, greedy, logits
from support.ways import FIRST, check

pytestmark = pytest.mark.texts

BOUND = 5e-5  # of the logits' standard deviation

# Float32 rounds, and sharp attention makes more of that. Measured: 8.5e-5, 5.9e-5 and 5.4e-5, where transformers in
# float32 is 3.8e-5, 4.9e-5 and 4.0e-5 from itself in float64, and Quire's Granite 2.8e-5.
# Nemotron's squares make more of it: transformers is 2.7e-4, 1.4e-4 and (Ministral 3) 1.2e-4 from itself in float64.
# Of the models with a delta rule, Qwen3.5 with experts is 2.9e-4 from transformers, which is 3e-4 from itself, and Kimi
# Linear 7.3e-5. OLMo Hybrid is 4.7e-5 from transformers in float64, which is 2.9e-5 from itself. Gemma 4 with experts
# is 1.0e-4 from itself, with shared layers 3.3e-5. Step 3.5 is 1.1e-4 from itself, DBRX 7.3e-4, Zamba2 8e-4,
# PLaMo 3 7.2e-5. Ling 3, which has a delta rule, is 5.2e-5 from transformers.
NOISY = {
    "gemma2-without-caps": 1.5e-4,
    "deepseek_v3": 1e-4,
    "granite": 1e-4,
    "nemotron": 1.5e-4,
    "nemotron-biases": 1.5e-4,
    "ministral3": 1e-4,
    "qwen3_5_moe_text": 6e-4,
    "kimi_linear": 1.5e-4,
    "olmo_hybrid": 1e-4,
    "step3p5": 2e-4,
    "dbrx": 2e-3,
    "zamba2": 2e-3,
    "zamba2-one-block": 1e-3,
    "dots3_note_text": 2e-4,
    "dots3_note_text-published-fields": 4e-4,
    "gemma4": 1e-4,
    "gemma4-experts": 2.5e-4,
    "gemma4-other-layers": 1.5e-4,
    "plamo3": 1.5e-4,
    "bailing_hybrid": 1e-4,
    "minimax_m3": 1.5e-4,
    "iquestloopcoder": 1e-4,
    "glm5_next": 1e-4,
}


def bound(variant: str) -> float:
    return NOISY.get(variant, BOUND)


each_variant = pytest.mark.parametrize("variant", list(ALL_VARIANTS))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("backend", "block_size"), [("reference", 1), ("reference", 5), ("cpu", 32), ("cpu", 48)])
def test_greedy_tokens_equal_transformers_with_other_block_sizes(checkpoints, references, backend, block_size):
    variant = "qwen3-mixed-windows-biases"
    llm = make_llm(checkpoints.path(variant), backend, block_size=block_size, max_num_batched_tokens=40)
    check(llm, references.continuations(variant)[: len(LENGTHS)])


def test_greedy_tokens_equal_transformers_without_prefix_caching(checkpoints, references):
    variant = "qwen3-mixed-windows-biases"
    llm = make_llm(checkpoints.path(variant), enable_prefix_caching=False, num_gpu_blocks_override=40)
    expected = references.continuations(variant)
    check(llm, expected)
    assert_preempted(llm)
    assert llm.core.scheduler.stats.prefix_hits == 0


def variants_and_kernels() -> list[Any]:
    """In each run, the first variant of each family and one in four of the others; the reference kernels are slower."""
    some = {"cpu": pytest.mark.sampled(4), "reference": pytest.mark.sampled(10)}
    return [
        pytest.param(variant, kernels, marks=[] if variant in FIRST and kernels == "cpu" else some[kernels])
        for kernels in some
        for variant in ALL_VARIANTS
    ]


@pytest.mark.parametrize(("variant", "backend"), variants_and_kernels())
def test_logits_equal_transformers(checkpoints, references, variant, backend):
    continuation = references.continuations(variant)[len(LENGTHS) - 1]
    text = continuation.prompt + continuation.token_ids
    expected = logits(references.model(variant), text)
    llm = make_llm(checkpoints.path(variant), backend)
    for chunks in ([len(text)], [1, 15, 17, 40, 1, len(text) - 74]):
        difference = (teacher_forced_logits(llm, text, chunks) - expected).abs().max() / expected.std()
        assert difference < bound(variant)


@pytest.mark.sampled(20)
@each_variant
def test_the_checkpoints_can_tell_right_from_wrong(references, variant):
    """Sharp enough logits, output that is seldom a loop, hardly a tie: else the comparisons above say little."""
    continuations = references.continuations(variant)
    longest = continuations[len(LENGTHS) - 1]
    least = 0.4 if variant == "bailing_moe-normed-head" else 1  # whose head's weights are small
    assert logits(references.model(variant), longest.prompt + longest.token_ids).std() >= least
    assert sum(len(set(c.token_ids)) for c in continuations) >= 25 * len(continuations)
    assert sum(c.certain for c in continuations) >= 0.95 * NUM_TOKENS * len(continuations)


def test_padding_has_no_effect_on_the_reference(references):
    for variant in ("llama", "mistral-window-20"):
        for continuation in references.continuations(variant)[:3]:
            greedy(references.model(variant), [continuation.prompt])[0].check(continuation.token_ids)


def test_the_tests_prompts_and_outputs_fit(references):
    assert max(LENGTHS) + NUM_TOKENS <= MAX_MODEL_LEN
    assert torch.get_num_threads() == 1
