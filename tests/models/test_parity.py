"""Every architecture against transformers: the same logits, and the same greedy tokens however the work is cut up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.engine.llm import LLM
from support.checkpoints import ALL_VARIANTS, FAMILIES
from support.engines import (
    GREEDY,
    MAX_MODEL_LEN,
    assert_preempted,
    generate,
    make_llm,
    teacher_forced_logits,
    tokens_of,
)
from support.late_device import run_late
from support.reference import FEWER_PROMPTS, LENGTHS, NUM_TOKENS, Continuation, greedy, logits

pytestmark = pytest.mark.texts

COMBINES = [
    "chunked prefill, prefix caching, preemption, sliding window, two steps in flight",
    "experts, latent attention, sparse attention, sinks, soft caps and ALiBi × chunked prefill, prefix caching, "
    "preemption, sliding window, two steps in flight",
    "recurrent layers × experts, latent attention, chunked prefill, prefix caching, preemption, two steps in flight",
]

MakeLLM = Callable[..., LLM]
BOUND = 5e-5  # of the logits' standard deviation

# Float32 rounds, and sharp attention makes more of that. Measured: 8.5e-5, 5.9e-5 and 5.4e-5, where transformers in
# float32 is 3.8e-5, 4.9e-5 and 4.0e-5 from itself in float64, and Quire's Granite 2.8e-5.
# Nemotron's squares make more of it: transformers is 2.7e-4, 1.4e-4 and (Ministral 3) 1.2e-4 from itself in float64.
# Of the models with a delta rule, Qwen3.5 with experts is 2.9e-4 from transformers, which is 3e-4 from itself, and Kimi
# Linear 7.3e-5.
NOISY = {
    "gemma2-without-caps": 1.5e-4,
    "deepseek_v3": 1e-4,
    "granite": 1e-4,
    "nemotron": 1.5e-4,
    "nemotron-biases": 1.5e-4,
    "ministral3": 1e-4,
    "qwen3_5_moe_text": 6e-4,
    "kimi_linear": 1.5e-4,
}
FIRST = [variants[0] for variants in FAMILIES.values()]


def bound(variant: str) -> float:
    return NOISY.get(variant, BOUND)


each_variant = pytest.mark.parametrize("variant", list(ALL_VARIANTS))


def check(llm: LLM, expected: list[Continuation]) -> None:
    outputs = generate(llm, [c.prompt for c in expected])
    for continuation, token_ids in zip(expected, tokens_of(outputs), strict=True):
        continuation.check(token_ids)


def alone(make: MakeLLM, expected: list[Continuation]) -> None:
    llm = make()
    for continuation in expected[: len(LENGTHS) : 2]:
        check(llm, [continuation])


def in_a_batch(make: MakeLLM, expected: list[Continuation]) -> None:
    check(make(), expected)


def in_chunks_of_24(make: MakeLLM, expected: list[Continuation]) -> None:
    check(make(max_num_batched_tokens=24, max_num_seqs=24), expected)


def with_a_warm_cache(make: MakeLLM, expected: list[Continuation]) -> None:
    llm = make(num_gpu_blocks_override=1500)  # nothing is evicted
    check(llm, expected)
    outputs = generate(llm, [c.prompt for c in expected])
    for continuation, output in zip(expected, outputs, strict=True):
        assert output.num_cached_tokens == (len(continuation.prompt) - 1) // 16 * 16
        continuation.check(output.outputs[0].token_ids)
    # The cache also holds what was generated: go on from the middle of it.
    longer = [c for c in expected if c.certain > 40]
    prompts = [c.prompt + c.token_ids[:40] for c in longer]
    for continuation, output in zip(longer, generate(llm, prompts, GREEDY.clone(max_tokens=24)), strict=True):
        assert output.num_cached_tokens == (len(continuation.prompt) + 39) // 16 * 16
        rest = continuation.token_ids[40 : continuation.certain]
        assert output.outputs[0].token_ids[: len(rest)] == rest


def in_a_tiny_pool(make: MakeLLM, depth: int, **options: int) -> LLM:
    """An engine with few more blocks than one request of full length needs: of states, these are few."""
    needed = 200
    for blocks in (needed, None):
        llm = make(num_gpu_blocks_override=blocks or needed + min(needed, 12), **options)
        if depth > 1:
            run_late(llm, depth)
        needed = llm.core.scheduler.kv.max_blocks(MAX_MODEL_LEN)
    return llm


def preempted(make: MakeLLM, expected: list[Continuation]) -> None:
    llm = in_a_tiny_pool(make, depth=1)
    check(llm, expected)
    assert_preempted(llm)


def two_steps_deep(make: MakeLLM, expected: list[Continuation]) -> None:
    llm = make()
    device = run_late(llm)
    check(llm, expected)
    assert device.most_in_flight == 2


def two_steps_deep_in_chunks_preempted(make: MakeLLM, expected: list[Continuation]) -> None:
    llm = in_a_tiny_pool(make, depth=2, max_num_batched_tokens=24, max_num_seqs=24)
    check(llm, expected[:FEWER_PROMPTS])  # the steps are many and slow
    assert llm.core.executor.most_in_flight == 2
    assert_preempted(llm)


WAYS = [
    alone,
    in_a_batch,
    in_chunks_of_24,
    with_a_warm_cache,
    preempted,
    two_steps_deep,
    two_steps_deep_in_chunks_preempted,
]


FEW_WAYS = [in_chunks_of_24, with_a_warm_cache, two_steps_deep_in_chunks_preempted]
# Each family goes the hardest way. Of its other ways one in four runs each time, and of those of other variants one
# in six.
PLAN = [
    *((variant, FEW_WAYS[-1]) for variant in FIRST),
    *(
        pytest.param(variant, way, marks=pytest.mark.sampled(4 if variant in FIRST else 6))
        for variant in ALL_VARIANTS
        for way in (WAYS[:-1] if variant in FIRST else FEW_WAYS)
    ),
]


def name_of(value: Any) -> str:
    return getattr(value, "__name__", value)


@pytest.mark.parametrize(("variant", "way"), PLAN, ids=name_of)
def test_greedy_tokens_equal_transformers_with_the_cpu_kernels(checkpoints, references, variant, way):
    way(lambda **options: make_llm(checkpoints.path(variant), "cpu", **options), references.continuations(variant))


@pytest.mark.slow
@pytest.mark.sampled(4)
@each_variant
@pytest.mark.parametrize("way", [two_steps_deep_in_chunks_preempted], ids=name_of)
def test_greedy_tokens_equal_transformers_with_the_reference_kernels(checkpoints, references, variant, way):
    expected = references.continuations(variant)[: len(LENGTHS)]
    way(lambda **options: make_llm(checkpoints.path(variant), "reference", **options), expected)


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


@each_variant
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_logits_equal_transformers(checkpoints, references, variant, backend):
    continuation = references.continuations(variant)[len(LENGTHS) - 1]
    text = continuation.prompt + continuation.token_ids
    expected = logits(references.model(variant), text)
    llm = make_llm(checkpoints.path(variant), backend)
    for chunks in ([len(text)], [1, 15, 17, 40, 1, len(text) - 74]):
        difference = (teacher_forced_logits(llm, text, chunks) - expected).abs().max() / expected.std()
        assert difference < bound(variant)


@each_variant
def test_the_checkpoints_can_tell_right_from_wrong(references, variant):
    """Sharp enough logits, output that is seldom a loop, hardly a tie: else the comparisons above say little."""
    continuations = references.continuations(variant)
    longest = continuations[len(LENGTHS) - 1]
    assert logits(references.model(variant), longest.prompt + longest.token_ids).std() >= 1
    assert sum(len(set(c.token_ids)) for c in continuations) >= 25 * len(continuations)
    assert sum(c.certain for c in continuations) >= 0.95 * NUM_TOKENS * len(continuations)


def test_padding_has_no_effect_on_the_reference(references):
    for variant in ("llama", "mistral-window-20"):
        for continuation in references.continuations(variant)[:3]:
            greedy(references.model(variant), [continuation.prompt])[0].check(continuation.token_ids)


def test_the_tests_prompts_and_outputs_fit(references):
    assert max(LENGTHS) + NUM_TOKENS <= MAX_MODEL_LEN
    assert torch.get_num_threads() == 1
