"""Encoder-decoder models of texts against transformers: the same greedy tokens however the work is cut up.

The encoder's texts have other lengths in each request, and two requests have the same text. The decoder starts with the
model's own tokens, or with a text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from quire.config import ConfigError
from quire.engine.llm import LLM
from quire.kvcache.specs import CrossAttentionSpec
from quire.messages.sampling_params import SamplingParams
from support.encoder_decoders import KINDS, LONGEST, NUM_TOKENS, TEXTS, continuation, network, written
from support.engines import assert_preempted, generate, make_llm, runner_of
from support.late_device import run_late

COMBINES = [
    "an encoder of texts × chunked prefill, prefix caching, preemption, two steps in flight, tensor parallelism",
    "an encoder of texts × speculation",
]

MakeLLM = Callable[..., LLM]
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
BEFORE = list(range(10, 60))
CASES: list[tuple[str, list[int] | None]] = [  # the encoder's text, and what follows the beginning of the decoder's
    *((text, None) for text in TEXTS), (TEXTS[1], BEFORE), (TEXTS[0], BEFORE[:20]),
]  # fmt: skip


@pytest.fixture(scope="module")
def expected(folder) -> Callable[[str], list[Any]]:
    from transformers import AutoTokenizer

    def make(kind: str) -> list[Any]:
        tokenizer, found = AutoTokenizer.from_pretrained(written(folder, kind)), []
        for text, more in CASES:
            decoder = KINDS[kind].beginning + (more or [])
            prompt: Any = text
            if more is not None:
                prompt = {"encoder_prompt": {"prompt": text}, "decoder_prompt": {"prompt_token_ids": decoder}}
            found.append((prompt, continuation(folder, kind, tokenizer(text)["input_ids"], decoder)))
        return found

    made: dict[str, list[Any]] = {}
    return lambda kind: made.get(kind) or made.setdefault(kind, make(kind))


def check(llm: LLM, expected: list[Any]) -> None:
    outputs = generate(llm, [prompt for prompt, _ in expected], PARAMS)
    for (_, wanted), output in zip(expected, outputs, strict=True):
        assert output.prompt_token_ids == wanted.prompt
        wanted.check(output.outputs[0].token_ids)


def alone(make: MakeLLM, expected: list[Any]) -> None:
    llm = make()
    for item in expected:
        check(llm, [item])


def in_a_batch(make: MakeLLM, expected: list[Any]) -> None:
    llm = make()
    for _ in range(2):  # the second time, all embeddings are in the cache
        check(llm, expected)


def in_chunks(make: MakeLLM, expected: list[Any]) -> None:
    check(make(max_num_batched_tokens=16), expected)


def with_a_small_encoder_cache(make: MakeLLM, expected: list[Any]) -> None:
    check(make(max_num_batched_tokens=64, encoder_cache_size=LONGEST), expected)


def preempted(make: MakeLLM, expected: list[Any]) -> None:
    llm = make(num_gpu_blocks_override=24, max_model_len=100)
    check(llm, expected * 3)
    assert_preempted(llm)


def two_steps_deep(make: MakeLLM, expected: list[Any]) -> None:
    llm = make(max_num_batched_tokens=32)
    run_late(llm)
    check(llm, expected)


def with_drafts(make: MakeLLM, expected: list[Any]) -> None:
    check(make(speculative_config={"method": "suffix", "num_speculative_tokens": 3}), expected)


def with_the_reference_kernels(make: MakeLLM, expected: list[Any]) -> None:
    check(make(backend="reference", max_num_batched_tokens=32), expected)


def on_two_ranks(make: MakeLLM, expected: list[Any]) -> None:
    check(make(tensor_parallel_size=2), expected)


WAYS = [
    alone, in_a_batch, in_chunks, with_a_small_encoder_cache, preempted, two_steps_deep, with_drafts,
    with_the_reference_kernels, on_two_ranks,
]  # fmt: skip


@pytest.fixture
def make(folder) -> Callable[..., LLM]:
    def make(kind: str, backend: str = "cpu", **options: Any) -> LLM:
        return make_llm(written(folder, kind), backend, **{"max_model_len": 100, "max_num_seqs": 8, **options})

    return make


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_greedy_tokens_equal_transformers(make, expected, kind, way):
    way(partial(make, kind), expected(kind))
