"""Ways in which an engine computes greedy tokens: whole, in chunks, with cached prefixes, preempted, two steps deep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.llm import LLM
from support.checkpoints import FAMILIES
from support.engines import GREEDY, MAX_MODEL_LEN, assert_preempted, generate, tokens_of
from support.late_device import run_late
from support.reference import FEWER_PROMPTS, LENGTHS, Continuation

MakeLLM = Callable[..., LLM]
Way = Callable[[MakeLLM, list[Continuation]], None]
FIRST = [variants[0] for variants in FAMILIES.values()]


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
        llm = make(num_gpu_blocks_override=blocks or needed + min(needed // 2, 12), **options)
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


WAYS: list[Way] = [
    alone,
    in_a_batch,
    in_chunks_of_24,
    with_a_warm_cache,
    preempted,
    two_steps_deep,
    two_steps_deep_in_chunks_preempted,
]


def name_of(value: Any) -> str:
    return getattr(value, "__name__", value)
