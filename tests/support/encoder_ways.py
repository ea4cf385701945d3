"""Ways to run requests of a model with an encoder, each of which has to give the same greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from quire.engine.llm import LLM
from quire.kv.specs import CrossAttentionSpec
from quire.messages.sampling_params import SamplingParams
from support.engines import assert_preempted
from support.late_device import run_late


@dataclass(frozen=True)
class Encoded:
    """make: starts an engine with options. check: runs the expected requests together. longest: embeddings of the
    longest input. few_blocks: so few that requests of max_model_len=100 preempt each other."""

    make: Callable[..., LLM]
    check: Callable[[LLM, list[Any]], Any]
    expected: list[Any]
    longest: int
    few_blocks: int

    def check_with(self, **options: Any) -> None:
        self.check(self.make(**options), self.expected)


def check_cross_blocks(llm: LLM, prompt: Any, params: SamplingParams, blocks: int) -> None:
    """A request holds so many blocks of cross-attention, the same in all steps, and frees them."""
    kv = llm.core.scheduler.kv
    [group] = [group for group, spec in enumerate(kv.specs) if isinstance(spec, CrossAttentionSpec)]
    llm.core.add_request(llm.processor.process("a", prompt, params).core_requests[0])
    tables = []
    while llm.core.has_unfinished:
        llm.core.step()
        for running in llm.core.scheduler.requests.values():
            tables.append([block.block_id for block in running.blocks.tables[group]])
    assert len(tables) > 2
    assert all(table == tables[0] and len(table) == blocks for table in tables)
    assert kv.pool.num_free == kv.pool.num_usable


def alone(case: Encoded) -> None:
    llm = case.make()
    for item in case.expected:
        case.check(llm, [item])


def in_a_batch(case: Encoded) -> None:
    llm = case.make()
    for _ in range(2):  # the second time, all embeddings are in the cache
        case.check(llm, case.expected)


def in_chunks(case: Encoded) -> None:
    case.check_with(max_num_batched_tokens=16)


def with_a_small_encoder_cache(case: Encoded) -> None:
    case.check_with(max_num_batched_tokens=64, encoder_cache_size=case.longest)


def preempted(case: Encoded) -> None:
    llm = case.make(num_gpu_blocks_override=case.few_blocks, max_model_len=100)
    case.check(llm, case.expected * 3)
    assert_preempted(llm)


def two_steps_deep(case: Encoded) -> None:
    llm = case.make(max_num_batched_tokens=32)
    run_late(llm)
    case.check(llm, case.expected)


def with_drafts(case: Encoded) -> None:
    case.check_with(speculative_config={"method": "suffix", "num_speculative_tokens": 3})


def with_the_reference_kernels(case: Encoded) -> None:
    case.check_with(backend="reference", max_num_batched_tokens=32)


def on_two_ranks(case: Encoded) -> None:
    case.check_with(tensor_parallel_size=2)


WAYS = [
    alone,
    in_a_batch,
    in_chunks,
    with_a_small_encoder_cache,
    preempted,
    two_steps_deep,
    with_drafts,
    with_the_reference_kernels,
    pytest.param(on_two_ranks, marks=pytest.mark.slow),
]
