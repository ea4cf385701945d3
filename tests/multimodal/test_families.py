"""Every family that sees against transformers: the same greedy tokens however the work is cut up.

The prompts have one picture, two, the same picture twice, and none. Chunks of 24 tokens end within pictures.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from quire.engine.llm import LLM
from quire.messages.media import EncoderLimits
from quire.messages.sampling_params import SamplingParams
from support.engines import MAX_MODEL_LEN, assert_preempted, generate, make_llm, tokens_of
from support.late_device import run_late
from support.rehearsal import rehearsed
from support.seeing import FIRST, MODELS, NUM_TOKENS, prepared
from support.seeing_layouts import PUBLISHED

MakeLLM = Callable[..., LLM]
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SMALLEST_CHUNK = {"gemma3": 48, "paligemma": 112, "paligemma2": 112}  # whose pictures or prompts must be in one chunk


def prompts(expected: list[Any]) -> list[dict[str, Any]]:
    return [{"prompt": text, **({"multi_modal_data": {"image": p}} if p else {})} for p, text, _ in expected]


def check(llm: LLM, expected: list[Any]) -> Any:
    outputs = generate(llm, prompts(expected), PARAMS)
    for (_, _, continuation), output in zip(expected, outputs, strict=True):
        assert output.prompt_token_ids == continuation.prompt
        continuation.check(output.outputs[0].token_ids)
    return outputs


def alone(make: MakeLLM, expected: list[Any], chunk: int) -> None:
    llm = make()
    for item in expected:
        check(llm, [item])


def in_a_batch(make: MakeLLM, expected: list[Any], chunk: int) -> None:
    check(make(), expected)


def in_chunks(make: MakeLLM, expected: list[Any], chunk: int) -> None:
    check(make(max_num_batched_tokens=chunk, max_num_seqs=8), expected)


def with_a_small_encoder_budget(make: MakeLLM, expected: list[Any], chunk: int) -> None:
    of_a_prompt = max(continuation.prompt.count(FIRST) for _, _, continuation in expected)
    check(make(max_num_batched_tokens=2 * chunk, max_num_seqs=8, encoder_cache_size=max(of_a_prompt, 40)), expected)


def with_a_warm_cache(make: MakeLLM, expected: list[Any], chunk: int) -> None:
    llm = make()
    check(llm, expected)
    for (_, _, continuation), output in zip(expected, check(llm, expected), strict=True):
        assert output.num_cached_tokens == (len(continuation.prompt) - 1) // 16 * 16


def preempted(make: MakeLLM, expected: list[Any], chunk: int) -> None:
    needed, longest = 198, max(len(c.prompt) for _, _, c in expected) + NUM_TOKENS + 8
    for _ in range(2):  # the second time, few more than one request of full length needs
        llm = make(num_gpu_blocks_override=needed + 3, max_model_len=longest, max_num_batched_tokens=chunk)
        needed = llm.core.scheduler.kv.max_blocks(longest)
    check(llm, expected * 3)
    assert_preempted(llm)


def two_steps_deep(make: MakeLLM, expected: list[Any], chunk: int) -> None:
    llm = make(max_num_batched_tokens=2 * chunk, max_num_seqs=8)
    run_late(llm)
    check(llm, expected)


WAYS = [alone, in_a_batch, in_chunks, with_a_small_encoder_budget, with_a_warm_cache, preempted, two_steps_deep]


@pytest.mark.sampled(98)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_transformers(folder, name, way):
    path, expected = prepared(name, folder)
    way(
        lambda **options: make_llm(path, "cpu", **{"max_num_seqs": 8, **options}),
        expected,
        SMALLEST_CHUNK.get(name, 24),
    )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("way", [in_chunks, with_a_warm_cache, preempted], ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", PUBLISHED)
def test_greedy_tokens_of_published_layouts_equal_transformers(folder, name, way):
    path, expected = prepared(name, folder, PUBLISHED[name])
    way(lambda **options: make_llm(path, "cpu", **{"max_num_seqs": 8, **options}), expected, 24)


@pytest.mark.slow
def test_tokens_of_trajectories_are_never_generated(folder, tmp_path):
    path, expected = prepared("alpamayo2", folder, PUBLISHED["alpamayo2"])
    for file in path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    [output] = check(make_llm(path), expected[:1])
    first = output.outputs[0].token_ids[0]
    fields = {"traj_ids": {"history_id0": first, "future_id0": first + 1}, "history_vocab_size": 1}
    config = {**json.loads((path / "config.json").read_text()), **fields, "future_vocab_size": 1}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    [output] = generate(make_llm(tmp_path), prompts(expected[:1]), PARAMS)
    assert not {first, first + 1} & set(output.outputs[0].token_ids)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", MODELS)
def test_the_reference_kernels_say_the_same(folder, name):
    path, expected = prepared(name, folder)
    check(
        make_llm(path, "reference", max_num_batched_tokens=SMALLEST_CHUNK.get(name, 24), max_num_seqs=8), expected[:2]
    )


@pytest.mark.sampled(16)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_say_the_same(folder, name):
    path, expected = prepared(name, folder)
    chunk = SMALLEST_CHUNK.get(name, 64)
    check(make_llm(path, "cpu", tensor_parallel_size=2, max_num_batched_tokens=chunk, max_num_seqs=8), expected)


@pytest.mark.sampled(2)
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llava", "qwen3_5"])
def test_two_stages_say_the_same(folder, name):
    path, expected = prepared(name, folder)
    check(make_llm(path, "cpu", pipeline_parallel_size=2, max_num_batched_tokens=64, max_num_seqs=8), expected)


@pytest.mark.sampled(7)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_largest_pictures_are_encoded_to_measure_memory(folder, name):
    llm = make_llm(prepared(name, folder)[0], max_num_seqs=8)
    items, width = rehearsed(llm, EncoderLimits(400, 400, 400))
    assert [item.modality for item in items] == list(llm.processor.media.kinds)
    assert all(8 <= item.place.num_embeds <= 400 for item in items)
    assert width == (3 if name.startswith("qwen3_vl") else 1)


def test_token_ids_with_one_placeholder_for_each_picture_are_expanded(folder):
    path, expected = prepared("llava", folder)
    llm = make_llm(path)
    assert MAX_MODEL_LEN > NUM_TOKENS
    for pictures, text, continuation in expected[:2]:
        ids = llm.frontend.tokenizer.encode(text)
        [output] = generate(llm, [{"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}], PARAMS)
        assert output.prompt_token_ids == continuation.prompt
        continuation.check(output.outputs[0].token_ids)
    assert tokens_of([output])
