"""KV compression that goes on while requests generate: the tokens are those of a model with masks, however the work is
cut up, and caches stay small."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from test_kv_compression import FIELDS, SHORT_PROMPT, VARIANT, prompts
from test_tensor_parallel import RankedExecutor

from quire.attention.eviction import METHODS
from quire.config import ConfigError
from quire.engine.client import scheduler_limits
from quire.engine.core import EngineCore
from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
from quire.options.kv_compression import KVCompressionOptions
from quire.scheduler.compression import Compression
from quire.scheduler.scheduler import Scheduler
from support.checkpoints import Checkpoints
from support.compression import MaskedModel
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
from support.reference import References

pytestmark = pytest.mark.texts

COMBINES = [
    "KV compression × chunked prefill, prefix caching, preemption, seeded sampling, n > 1, two steps in flight, "
    "tensor parallelism, speculation, replay after a crash, structured outputs"
]

LONGEST = 232
COUNT = 90
PARAMS = GREEDY.clone(max_tokens=COUNT)
WHOLE = PARAMS.clone(kv_compression=False)
TEXTS = [*prompts(4), SHORT_PROMPT]


def make(checkpoints: Checkpoints, method: str = "kv_compress", **options: Any) -> LLM:
    fields = {**FIELDS, "method": method, "interval": 16, **options.pop("fields", {})}
    return make_llm(checkpoints.path(VARIANT), kv_compression=fields, max_model_len=LONGEST, **options)


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints) -> list[list[int]]:
    """The tokens of each prompt alone."""
    llm = make(checkpoints)
    return [tokens_of(generate(llm, [prompt], PARAMS))[0] for prompt in TEXTS]


@pytest.mark.parametrize(
    ("method", "ratio", "backend"),
    [
        ("kv_compress", 4, "cpu"),
        ("streaming_llm", 2, "cpu"),
        ("pyramidkv", 1.3, "cpu"),  # the first layer wants more blocks than it has
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(METHODS, (2, 4), ["cpu"])
            if case not in (("kv_compress", 4, "cpu"), ("streaming_llm", 2, "cpu"))
        ),
        pytest.param("kv_compress", 1.3, "cpu", marks=pytest.mark.slow),
        pytest.param("kv_compress", 2, "reference", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_a_model_with_masks(
    checkpoints: Checkpoints, references: References, method: str, ratio: float, backend: str
):
    fields = {**FIELDS, "method": method, "interval": 32 if ratio == 2 else 16, "ratio": ratio}
    masked = MaskedModel(references.model(VARIANT))
    options, expected, most = KVCompressionOptions.read(fields), [], 0
    for text in TEXTS[1:]:
        expected.append(masked.generate(options, text, COUNT, ratio))
        most = max(most, len(masked.points))
    assert most >= 3
    assert expected[0] != masked.generate(replace(options, interval=0), TEXTS[1], COUNT, ratio)
    llm = make(checkpoints, method, fields=fields, backend=backend)
    assert tokens_of(generate(llm, TEXTS[1:], PARAMS)) == expected


@pytest.mark.parametrize("way", ["chunked", "preempted", "two steps in flight", "preempted in flight"])
def test_tokens_do_not_depend_on_how_the_work_is_cut_up(checkpoints: Checkpoints, expected: list[list[int]], way: str):
    options: dict[str, Any] = {
        "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 12},
        "preempted": {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 48},
        "preempted in flight": {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 24, "max_num_seqs": 12},
    }.get(way, {})
    llm = make(checkpoints, **options)
    if "flight" in way:
        device = run_late(llm)
    # The first one is not compressed, and takes the blocks of others.
    texts = [*[SHORT_PROMPT] * 4, *TEXTS]
    found = tokens_of(generate(llm, [TEXTS[0], *texts], [WHOLE] + [PARAMS] * len(texts)))
    assert found[1:] == [*[expected[-1]] * 4, *expected]
    if "preempted" in way:
        assert_preempted(llm)
    if "flight" in way:
        assert device.most_in_flight == 2
        assert device.waits == 0, "nothing waits for the device while a step is launched"


def test_a_request_that_lost_its_core_goes_on_with_the_same_tokens(checkpoints: Checkpoints, expected: list[list[int]]):
    llm = make(checkpoints, max_num_batched_tokens=40)
    for count, prompt, tokens in zip((1, 15, 16, 47, 89), TEXTS, expected, strict=True):
        request = core_request(llm, "r", prompt, PARAMS)
        request.output_token_ids = tokens[:count]
        llm.core.add_request(request)
        assert finish(llm.core)["r"][0] == tokens[count:]


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_aborted_requests_leave_nothing_behind(checkpoints: Checkpoints, expected: list[list[int]], depth: int):
    llm = make(checkpoints, max_num_batched_tokens=64)
    if depth > 1:
        run_late(llm)
    made: Any = {}
    for steps in range(10, 60, 9):
        ids = [f"{steps}/{i}" for i in range(len(TEXTS))]
        for request_id, prompt in zip(ids, TEXTS, strict=True):
            llm.core.add_request(core_request(llm, request_id, prompt, PARAMS))
        for _ in range(steps):
            collect(llm.core, made)
        llm.core.abort_requests(ids[1:])
        while llm.core.has_unfinished:
            collect(llm.core, made)
        assert_nothing_is_left(llm.core)
        assert made[ids[0]][0] == expected[0]


def test_completions_of_one_prompt_differ_by_their_seeds_alone(checkpoints: Checkpoints):
    llm = make(checkpoints)
    drawn = SamplingParams(temperature=1, seed=5, max_tokens=COUNT, ignore_eos=True)
    together = tokens_of(generate(llm, [TEXTS[0]], drawn.clone(n=3)))
    assert together == [tokens_of(generate(llm, [TEXTS[0]], drawn.clone(seed=5 + i)))[0] for i in range(3)]


def test_drafts_of_the_host_change_no_token(checkpoints: Checkpoints, expected: list[list[int]]):
    options = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
    llm = make(checkpoints, speculative_config=options)
    assert tokens_of(generate(llm, TEXTS, PARAMS)) == expected
    assert llm.core.scheduler.speculation.stats.accepted_tokens > 0


def test_tokens_that_a_grammar_forces_pass_over_points(checkpoints: Checkpoints):
    """They are known at once, so a step has more of them than fit before the next compression."""
    choice = "the cat sat on the mat and then it had a nap and went home to eat, said the hat"
    params = PARAMS.clone(ignore_eos=False, structured_outputs={"choice": [choice]})
    llm = make(checkpoints, fields={"ratio": 4})
    assert [output.outputs[0].text for output in generate(llm, TEXTS, params)] == [choice] * len(TEXTS)


@pytest.mark.parametrize("method", ["snapkv", "streaming_llm"])
def test_ranks_say_what_one_rank_says(checkpoints: Checkpoints, method: str):
    llm = make(checkpoints, method)
    params = PARAMS.clone(max_tokens=MAX_MODEL_LEN - max(map(len, TEXTS)))
    alone = tokens_of(generate(llm, TEXTS, params))
    executor = RankedExecutor(checkpoints.path(VARIANT), 2, kv_compression=llm.config.cache.kv_compression)
    kv, limits = executor.kv_cache, scheduler_limits(llm.config, MAX_MODEL_LEN)
    compression = Compression(llm.config.cache.compression, 16)
    llm.core = EngineCore(Scheduler(limits, kv.num_blocks, list(kv.specs), 16, compression=compression), executor)
    assert tokens_of(generate(llm, TEXTS, params)) == alone


def test_requests_with_and_without_compression_share_steps(checkpoints: Checkpoints, expected: list[list[int]]):
    plain = make_llm(checkpoints.path(VARIANT), max_model_len=LONGEST)
    whole = tokens_of(generate(plain, TEXTS, PARAMS))
    llm = make(checkpoints)
    found = tokens_of(generate(llm, [*TEXTS, *TEXTS], [PARAMS] * len(TEXTS) + [WHOLE] * len(TEXTS)))
    assert found == [*expected, *whole]
    again = generate(llm, TEXTS, WHOLE)
    assert tokens_of(again) == whole, "no block of a compressed text is found"
    short = PARAMS.clone(max_tokens=4)
    assert generate(llm, [SHORT_PROMPT], short)[0].num_cached_tokens == 16, "it ends before it could be compressed"
    assert generate(llm, [SHORT_PROMPT], PARAMS)[0].num_cached_tokens == 0


def test_a_long_text_holds_few_blocks(checkpoints: Checkpoints):
    llm = make(checkpoints, fields={"ratio": 4})
    pool, most = llm.core.scheduler.kv.pool, []
    llm.core.add_request(core_request(llm, "r", SHORT_PROMPT, PARAMS.clone(max_tokens=LONGEST - 20)))
    while llm.core.has_unfinished:
        llm.core.step()
        request = llm.core.scheduler.requests.get("r")
        if request is not None:
            tokens = request.num_computed_tokens
            most.append(tokens)
            held = pool.num_usable - pool.num_free
            # a quarter, the tokens since the last compression, and parts of blocks
            assert held * 16 <= max(tokens / 4, 16) + 16 + 2 * 16
    assert most[-1] > 220
    assert_nothing_is_left(llm.core)


def test_an_interval_shorter_than_the_window_is_an_error(checkpoints: Checkpoints):
    with pytest.raises(ConfigError, match="interval must be 0 or at least the window, got 7"):
        make(checkpoints, fields={"interval": 7})
