"""Compressed prompts through the whole engine: the same tokens however the work is cut up, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
from test_tensor_parallel import RankedExecutor

from quire.config import ConfigError
from quire.engine.client import scheduler_limits
from quire.engine.core import EngineCore
from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from quire.scheduler.compression import Compression
from quire.scheduler.scheduler import Scheduler
from support.checkpoints import Checkpoints
from support.engines import (
    GREEDY,
    MAX_MODEL_LEN,
    assert_nothing_is_left,
    assert_preempted,
    collect,
    core_request,
    finish,
    generate,
    make_llm,
    tokens_of,
)
from support.late_device import run_late

pytestmark = pytest.mark.texts

COMBINES = [
    "KV compression × chunked prefill, prefix caching, preemption, seeded sampling, n > 1, two steps in flight, "
    "tensor parallelism, speculation, replay after a crash, structured outputs"
]

VARIANT = "llama-gqa2-tied-llama3"
FIELDS = {"window": 8, "sinks": 2, "ratio": 3}
PARAMS = GREEDY.clone(max_tokens=40)
WHOLE = PARAMS.clone(kv_compression=False)
CHOICE = {"choice": ["the cat", "the hat"]}
SHORT_PROMPT = list(range(20, 40))


def prompts(count: int = 6) -> list[list[int]]:
    """Prompts that are compressed, some of which end with a full block."""
    lengths = (128, 133, 80, 127, 97, 112)
    return [[4 + (i * i * (k + 3) + 7 * i) % 300 for i in range(lengths[k % 6])] for k in range(count)]


def make(checkpoints: Checkpoints, method: str = "kv_compress", **options: Any) -> LLM:
    fields = {**FIELDS, "method": method, **options.pop("fields", {})}
    return make_llm(checkpoints.path(VARIANT), kv_compression=fields, **options)


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints) -> list[list[int]]:
    """The tokens of each prompt alone."""
    llm = make(checkpoints)
    return [tokens_of(generate(llm, [prompt], PARAMS))[0] for prompt in prompts()]


@pytest.fixture(scope="module")
def whole(checkpoints: Checkpoints) -> list[list[int]]:
    """The tokens without compression."""
    return tokens_of(generate(make_llm(checkpoints.path(VARIANT)), [*prompts(), SHORT_PROMPT], PARAMS))


def test_a_ratio_of_1_says_what_an_engine_without_compression_says(checkpoints: Checkpoints, whole: list[list[int]]):
    llm = make(checkpoints, fields={"ratio": 1})
    assert tokens_of(generate(llm, [*prompts(), SHORT_PROMPT], PARAMS)) == whole
    llm = make(checkpoints)
    assert tokens_of(generate(llm, [*prompts(), SHORT_PROMPT], WHOLE)) == whole
    assert tokens_of(generate(llm, [SHORT_PROMPT], PARAMS)) == whole[-1:], "it is too short to be compressed"
    assert tokens_of(generate(llm, prompts(), PARAMS.clone(kv_compression={"ratio": 1}))) == whole[:-1]


def test_requests_with_and_without_compression_share_steps(
    checkpoints: Checkpoints, expected: list[list[int]], whole: list[list[int]]
):
    llm = make(checkpoints)
    texts, params = [], []
    for prompt in prompts():
        texts += [prompt, prompt]
        params += [PARAMS, WHOLE]
    found = tokens_of(generate(llm, [*texts, SHORT_PROMPT], [*params, PARAMS]))
    assert found[:-1:2] == expected
    assert found[1:-1:2] == whole[:-1]
    assert found[-1] == whole[-1]


@pytest.mark.parametrize("way", ["chunked", "preempted", "two steps in flight", "preempted in flight", "reference"])
def test_tokens_do_not_depend_on_how_the_work_is_cut_up(checkpoints: Checkpoints, expected: list[list[int]], way: str):
    options: dict[str, Any] = {
        "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 12},
        "preempted": {"num_gpu_blocks_override": 13, "max_num_batched_tokens": 48},
        "preempted in flight": {"num_gpu_blocks_override": 13, "max_num_batched_tokens": 24, "max_num_seqs": 12},
        "reference": {"backend": "reference"},
    }.get(way, {})
    llm = make(checkpoints, **options)
    if "flight" in way:
        device = run_late(llm)
    assert tokens_of(generate(llm, prompts(), PARAMS)) == expected
    if "preempted" in way:
        assert_preempted(llm)
    if "flight" in way:
        assert device.most_in_flight == 2
        assert device.waits == 0, "nothing waits for the device while a step is launched"


def test_compressed_prompts_neither_read_nor_fill_the_prefix_cache(checkpoints: Checkpoints, whole: list[list[int]]):
    llm = make(checkpoints)
    prompt = prompts()[0]
    generate(llm, [prompt], PARAMS)
    first = generate(llm, [prompt], WHOLE)[0]
    assert first.num_cached_tokens == 0
    again, compressed = generate(llm, [prompt, prompt], [WHOLE, PARAMS])
    assert (again.num_cached_tokens, compressed.num_cached_tokens) == (112, 0)
    assert again.outputs[0].token_ids == whole[0]


def test_a_compressed_prompt_holds_fewer_blocks(checkpoints: Checkpoints):
    llm = make(checkpoints, fields={"ratio": 4})
    pool = llm.core.scheduler.kv.pool
    llm.core.add_request(core_request(llm, "r", prompts()[1], PARAMS))
    llm.core.step()
    assert pool.num_usable - pool.num_free == 2, "of 133 tokens, 16 and the last 5 are kept"
    finish(llm.core)
    assert_nothing_is_left(llm.core)


@pytest.mark.parametrize("depth", [1, 2])
def test_aborted_requests_leave_nothing_behind(checkpoints: Checkpoints, expected: list[list[int]], depth: int):
    llm = make(checkpoints, max_num_batched_tokens=64)
    if depth > 1:
        run_late(llm)
    made: Any = {}
    for steps in range(12):
        ids = [f"{steps}/{i}" for i in range(6)]
        for request_id, prompt in zip(ids, prompts(), strict=True):
            llm.core.add_request(core_request(llm, request_id, prompt, PARAMS))
        for _ in range(steps):
            collect(llm.core, made)
        llm.core.abort_requests(ids[1:])
        while llm.core.has_unfinished:
            collect(llm.core, made)
        assert_nothing_is_left(llm.core)
        assert made[ids[0]][0] == expected[0]


def test_a_request_that_lost_its_core_goes_on_with_the_same_tokens(checkpoints: Checkpoints, expected: list[list[int]]):
    llm = make(checkpoints)
    for count, prompt, tokens in zip((1, 7, 20, 39), prompts(), expected, strict=False):
        request = core_request(llm, "r", prompt, PARAMS)
        request.output_token_ids = tokens[:count]
        llm.core.add_request(request)
        assert finish(llm.core)["r"][0] == tokens[count:]


def test_completions_of_one_prompt_differ_by_their_seeds_alone(checkpoints: Checkpoints):
    llm = make(checkpoints)
    drawn = SamplingParams(temperature=1, seed=5, max_tokens=30, ignore_eos=True)
    prompt = prompts()[0]
    together = tokens_of(generate(llm, [prompt], drawn.clone(n=3)))
    assert together == [tokens_of(generate(llm, [prompt], drawn.clone(seed=5 + i)))[0] for i in range(3)]


def test_drafts_of_the_host_change_no_token(checkpoints: Checkpoints, expected: list[list[int]]):
    options = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
    llm = make(checkpoints, speculative_config=options)
    assert tokens_of(generate(llm, prompts(), PARAMS)) == expected
    assert llm.core.scheduler.speculation.stats.accepted_tokens > 0


def test_a_constraint_holds_behind_a_compressed_prompt(checkpoints: Checkpoints):
    llm = make(checkpoints)
    output = generate(llm, [prompts()[0]], PARAMS.clone(ignore_eos=False, structured_outputs=CHOICE))[0]
    assert output.outputs[0].text in ("the cat", "the hat")


@pytest.mark.parametrize("method", ["snapkv", "streaming_llm"])
def test_ranks_say_what_one_rank_says(checkpoints: Checkpoints, method: str):
    """With the other methods, heads of different ranks do not share a budget, and may keep other keys."""
    llm = make(checkpoints, method)
    alone = tokens_of(generate(llm, prompts(), PARAMS))
    fields = {**FIELDS, "method": method}
    executor = RankedExecutor(checkpoints.path(VARIANT), 2, kv_compression=fields)
    kv, limits = executor.kv_cache, scheduler_limits(llm.config, MAX_MODEL_LEN)
    compression = Compression(llm.config.cache.compression, 16)
    llm.core = EngineCore(Scheduler(limits, kv.num_blocks, list(kv.specs), 16, compression=compression), executor)
    assert tokens_of(generate(llm, prompts(), PARAMS)) == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_compression": {"method": "h2o"}}, "method must be one of kv_compress, adakv"),
        ({"kv_compression": {"ratio": 0.5}}, "ratio must be a number from 1 to 1024, got 0.5"),
        ({"kv_compression": {"window": "32"}}, "window has the wrong type"),
        ({"kv_compression": {"budget": 5}}, "has no field 'budget'; it has method, ratio"),
        ({"kv_cache_dtype": "int8"}, "kv_compression and kv_cache_dtype='int8' exclude each other"),
        ({"pipeline_parallel_size": 2}, "kv_compression and pipeline_parallel_size exclude each other"),
        ({"batch_invariant": True}, "kv_compression and batch_invariant exclude each other"),
        ({"speculative_config": {"method": "mtp"}}, "kv_compression and drafters on the device"),
        ({"max_num_batched_tokens": 24, "max_num_seqs": 24}, "raise max_num_batched_tokens"),
    ],
)
def test_what_cannot_work_is_an_error_at_start(checkpoints: Checkpoints, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        make_llm(checkpoints.path(VARIANT), **{"kv_compression": dict(FIELDS), **options})


@pytest.mark.parametrize(
    ("variant", "feature"),
    [("mistral-window-20", "sliding windows"), ("deepseek_v3", "latent attention"), ("falcon-rw", "ALiBi")],
)
def test_a_model_whose_cache_cannot_be_compressed_is_refused(checkpoints: Checkpoints, variant: str, feature: str):
    with pytest.raises(ConfigError, match=f"kv_compression cannot be used with a model that has .*{feature}"):
        make_llm(checkpoints.path(variant), kv_compression=dict(FIELDS))


def test_requests_are_told_what_is_wrong(checkpoints: Checkpoints):
    plain = make_llm(checkpoints.path(VARIANT))
    with pytest.raises(ValueError, match="kv_compression needs an engine that compresses"):
        plain.generate([SHORT_PROMPT], PARAMS.clone(kv_compression={"ratio": 2}))
    assert plain.generate([SHORT_PROMPT], WHOLE), "there is nothing to turn off, and that is no error"
    with pytest.raises(ValueError, match="ratio must be a number from 1 to 1024, got 0"):
        SamplingParams(kv_compression={"ratio": 0})
    for wrong in ("yes", {"method": "snapkv"}, {"ratio": 2, "window": 8}, 4):
        with pytest.raises(TypeError, match="kv_compression must be True, False or"):
            SamplingParams(kv_compression=wrong)
