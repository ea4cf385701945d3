"""KV compression through the whole engine, once behind the prompt and again at an interval: the tokens are the same
however the work is cut up, and nothing is left behind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from test_tensor_parallel import RankedExecutor

from quire.attention.eviction import METHODS
from quire.config.engine import ConfigError
from quire.config.kv_compression import KVCompressionOptions
from quire.engine.assemble import scheduler_limits
from quire.engine.core import EngineCore
from quire.engine.llm import LLM
from quire.messages.sampling_params import SamplingParams
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

VARIANT = "llama-gqa2-tied-llama3"
FIELDS = {"window": 8, "sinks": 2, "ratio": 3}
LONGEST = 232
CHOICE = {"choice": ["the cat", "the hat"]}
SHORT_PROMPT = list(range(20, 40))


def prompts(count: int = 6) -> list[list[int]]:
    """Prompts that are compressed, some of which end with a full block."""
    lengths = (128, 133, 80, 127, 97, 112)
    return [[4 + (i * i * (k + 3) + 7 * i) % 300 for i in range(lengths[k % 6])] for k in range(count)]


@dataclass(frozen=True)
class Case:
    """When caches are compressed, and work that meets it."""

    texts: list[list[int]]
    """The last one is too short to be compressed behind its prompt."""
    params: SamplingParams
    fields: dict[str, Any]
    few_blocks: int
    """The longest text fits, and more texts at once do not."""
    max_model_len: int = MAX_MODEL_LEN

    @property
    def whole(self) -> SamplingParams:
        return self.params.clone(kv_compression=False)

    def make(self, checkpoints: Checkpoints, method: str = "kv_compress", **options: Any) -> LLM:
        fields = {**FIELDS, **self.fields, "method": method, **options.pop("fields", {})}
        limit = self.max_model_len
        return make_llm(checkpoints.path(VARIANT), kv_compression=fields, max_model_len=limit, **options)


ONCE = Case([*prompts(6), SHORT_PROMPT], GREEDY.clone(max_tokens=40), {}, few_blocks=13)
AGAIN = Case(
    [*prompts(4), SHORT_PROMPT], GREEDY.clone(max_tokens=90), {"interval": 16}, few_blocks=20, max_model_len=LONGEST
)


@pytest.fixture(scope="module", params=[ONCE, AGAIN], ids=["once", "again"])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def expected(checkpoints: Checkpoints, case: Case) -> list[list[int]]:
    """The tokens of each text alone."""
    llm = case.make(checkpoints)
    return [tokens_of(generate(llm, [text], case.params))[0] for text in case.texts]


@pytest.fixture(scope="module")
def whole(checkpoints: Checkpoints, case: Case) -> list[list[int]]:
    """The tokens without compression."""
    plain = make_llm(checkpoints.path(VARIANT), max_model_len=case.max_model_len)
    return tokens_of(generate(plain, case.texts, case.params))


def test_a_ratio_of_1_says_what_an_engine_without_compression_says(
    checkpoints: Checkpoints, case: Case, whole: list[list[int]]
):
    llm = case.make(checkpoints, fields={"ratio": 1})
    assert tokens_of(generate(llm, case.texts, case.params)) == whole
    llm = case.make(checkpoints)
    assert tokens_of(generate(llm, case.texts, case.params.clone(kv_compression={"ratio": 1}))) == whole


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("method", "ratio", "backend"),
    [
        ("kv_compress", 4, "cpu"),
        ("pyramidkv", 1.3, "cpu"),  # the first layer wants more blocks than it has
        *(
            pytest.param(*case, marks=[pytest.mark.slow, pytest.mark.sampled(4)])
            for case in product(METHODS, (2, 4), ["cpu"])
            if case != ("kv_compress", 4, "cpu")
        ),
        pytest.param("kv_compress", 1.3, "cpu", marks=pytest.mark.nightly),
        pytest.param("kv_compress", 2, "reference", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_a_model_with_masks(
    checkpoints: Checkpoints, references: References, method: str, ratio: float, backend: str
):
    fields = {"interval": 32 if ratio == 2 else 16, "ratio": ratio}
    masked, count, texts = MaskedModel(references.model(VARIANT)), AGAIN.params.max_tokens, AGAIN.texts[1:3]
    options = KVCompressionOptions.read({**FIELDS, **fields, "method": method})
    expected, most = [], 0
    for text in texts:
        expected.append(masked.generate(options, text, count, ratio))
        most = max(most, len(masked.points))
    assert most >= 3
    assert expected[0] != masked.generate(replace(options, interval=0), texts[0], count, ratio)
    llm = AGAIN.make(checkpoints, method, fields=fields, backend=backend)
    assert tokens_of(generate(llm, texts, AGAIN.params)) == expected


def test_requests_with_and_without_compression_share_steps(
    checkpoints: Checkpoints, case: Case, expected: list[list[int]], whole: list[list[int]]
):
    llm, count = case.make(checkpoints), len(case.texts)
    found = tokens_of(generate(llm, case.texts * 2, [case.params] * count + [case.whole] * count))
    assert found == [*expected, *whole]
    assert (expected[-1] == whole[-1]) == (case is ONCE), "the short prompt is compressed when it has grown"


@pytest.mark.slow
@pytest.mark.sampled(10)
@pytest.mark.parametrize("way", ["chunked", "preempted", "two steps in flight", "preempted in flight", "reference"])
def test_tokens_do_not_depend_on_how_the_work_is_cut_up(
    checkpoints: Checkpoints, case: Case, expected: list[list[int]], way: str
):
    few = {"num_gpu_blocks_override": case.few_blocks}
    options: dict[str, Any] = {
        "chunked": {"max_num_batched_tokens": 24, "max_num_seqs": 12},
        "preempted": {**few, "max_num_batched_tokens": 48},
        "preempted in flight": {**few, "max_num_batched_tokens": 24, "max_num_seqs": 12},
        "reference": {"backend": "reference"},
    }.get(way, {})
    llm = case.make(checkpoints, **options)
    if "flight" in way:
        device = run_late(llm)
    # The first one is not compressed, and takes the blocks of others.
    texts = [*[SHORT_PROMPT] * 4, *case.texts]
    found = tokens_of(generate(llm, [case.texts[0], *texts], [case.whole] + [case.params] * len(texts)))
    assert found[1:] == [*[expected[-1]] * 4, *expected]
    if "preempted" in way:
        assert_preempted(llm)
    if "flight" in way:
        assert device.most_in_flight == 2
        assert device.waits == 0, "nothing waits for the device while a step is launched"


@pytest.mark.sampled(2)
def test_compressed_texts_neither_read_nor_fill_the_prefix_cache(
    checkpoints: Checkpoints, case: Case, whole: list[list[int]]
):
    llm, text = case.make(checkpoints), case.texts[0]
    generate(llm, [text], case.params)
    first = generate(llm, [text], case.whole)[0]
    assert first.num_cached_tokens == 0
    again, compressed = generate(llm, [text, text], [case.whole, case.params])
    assert (again.num_cached_tokens, compressed.num_cached_tokens) == (112, 0)
    assert again.outputs[0].token_ids == whole[0]


def test_texts_that_end_before_they_could_be_compressed_use_the_prefix_cache(checkpoints: Checkpoints):
    llm = AGAIN.make(checkpoints)
    generate(llm, [SHORT_PROMPT], AGAIN.whole)
    short = AGAIN.params.clone(max_tokens=4)
    assert generate(llm, [SHORT_PROMPT], short)[0].num_cached_tokens == 16
    assert generate(llm, [SHORT_PROMPT], AGAIN.params)[0].num_cached_tokens == 0


def test_a_compressed_prompt_holds_fewer_blocks(checkpoints: Checkpoints):
    llm = ONCE.make(checkpoints, fields={"ratio": 4})
    pool = llm.core.scheduler.kv.pool
    llm.core.add_request(core_request(llm, "r", prompts()[1], ONCE.params))
    llm.core.step()
    assert pool.num_usable - pool.num_free == 2, "of 133 tokens, 16 and the last 5 are kept"
    finish(llm.core)
    assert_nothing_is_left(llm.core)


def test_a_long_text_holds_few_blocks(checkpoints: Checkpoints):
    llm = AGAIN.make(checkpoints, fields={"ratio": 4})
    pool, most = llm.core.scheduler.kv.pool, []
    llm.core.add_request(core_request(llm, "r", SHORT_PROMPT, AGAIN.params.clone(max_tokens=LONGEST - 20)))
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("depth", [1, 2])
def test_aborted_requests_leave_nothing_behind(
    checkpoints: Checkpoints, case: Case, expected: list[list[int]], depth: int
):
    llm = case.make(checkpoints, max_num_batched_tokens=64)
    if depth > 1:
        run_late(llm)
    made: Any = {}
    for steps in range(12) if case is ONCE else range(10, 60, 9):
        ids = [f"{steps}/{i}" for i in range(len(case.texts))]
        for request_id, text in zip(ids, case.texts, strict=True):
            llm.core.add_request(core_request(llm, request_id, text, case.params))
        for _ in range(steps):
            collect(llm.core, made)
        llm.core.abort_requests(ids[1:])
        while llm.core.has_unfinished:
            collect(llm.core, made)
        assert_nothing_is_left(llm.core)
        assert made[ids[0]][0] == expected[0]


@pytest.mark.sampled(2)
def test_a_request_that_lost_its_core_goes_on_with_the_same_tokens(
    checkpoints: Checkpoints, case: Case, expected: list[list[int]]
):
    llm = case.make(checkpoints, max_num_batched_tokens=40)
    counts = (1, 7, 20, 39) if case is ONCE else (1, 15, 16, 47, 89)
    for count, text, tokens in zip(counts, case.texts, expected, strict=False):
        request = core_request(llm, "r", text, case.params)
        request.output_token_ids = tokens[:count]
        llm.core.add_request(request)
        assert finish(llm.core)["r"][0] == tokens[count:]


@pytest.mark.sampled(2)
def test_completions_of_one_prompt_differ_by_their_seeds_alone(checkpoints: Checkpoints, case: Case):
    llm, text = case.make(checkpoints), case.texts[0]
    drawn = case.params.clone(temperature=1, seed=5)
    together = tokens_of(generate(llm, [text], drawn.clone(n=3)))
    assert together == [tokens_of(generate(llm, [text], drawn.clone(seed=5 + i)))[0] for i in range(3)]


def test_drafts_of_the_host_change_no_token(checkpoints: Checkpoints, case: Case, expected: list[list[int]]):
    options = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
    llm = case.make(checkpoints, speculative_config=options)
    assert tokens_of(generate(llm, case.texts, case.params)) == expected
    assert llm.core.scheduler.speculation.stats.accepted_tokens > 0


def test_a_constraint_holds_behind_a_compressed_prompt(checkpoints: Checkpoints):
    llm = ONCE.make(checkpoints)
    params = ONCE.params.clone(ignore_eos=False, structured_outputs=CHOICE)
    assert generate(llm, [prompts()[0]], params)[0].outputs[0].text in ("the cat", "the hat")


def test_tokens_that_a_grammar_forces_pass_over_points(checkpoints: Checkpoints):
    """They are known at once, so a step has more of them than fit before the next compression."""
    choice = "the cat sat on the mat and then it had a nap and went home to eat, said the hat"
    params = AGAIN.params.clone(ignore_eos=False, structured_outputs={"choice": [choice]})
    llm = AGAIN.make(checkpoints, fields={"ratio": 4})
    assert [output.outputs[0].text for output in generate(llm, AGAIN.texts, params)] == [choice] * len(AGAIN.texts)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", ["snapkv", "streaming_llm"])
def test_ranks_say_what_one_rank_says(checkpoints: Checkpoints, case: Case, method: str):
    """With the other methods, heads of different ranks do not share a budget, and may keep other keys."""
    llm = case.make(checkpoints, method)
    params = case.params.clone(max_tokens=MAX_MODEL_LEN - max(map(len, case.texts)))
    alone = tokens_of(generate(llm, case.texts, params))
    executor = RankedExecutor(checkpoints.path(VARIANT), 2, kv_compression=llm.config.cache.kv_compression)
    kv, limits = executor.kv_cache, scheduler_limits(llm.config, MAX_MODEL_LEN)
    compression = Compression(llm.config.cache.compression, 16)
    llm.core = EngineCore(Scheduler(limits, kv.num_blocks, list(kv.specs), 16, compression=compression), executor)
    assert tokens_of(generate(llm, case.texts, params)) == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_compression": {"method": "h2o"}}, "method must be one of 'kv_compress', 'adakv'"),
        ({"kv_compression": {"ratio": 0.5}}, "ratio must be a number from 1 to 1024, got 0.5"),
        ({"kv_compression": {"window": "32"}}, "window must be of type int, got '32'"),
        ({"kv_compression": {**FIELDS, "interval": 7}}, "interval must be 0 or at least the window, got 7"),
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
        plain.generate([SHORT_PROMPT], ONCE.params.clone(kv_compression={"ratio": 2}))
    assert plain.generate([SHORT_PROMPT], ONCE.whole), "there is nothing to turn off, and that is no error"
    with pytest.raises(ValueError, match="ratio must be a number from 1 to 1024, got 0"):
        SamplingParams(kv_compression={"ratio": 0})
    for wrong in ("yes", {"method": "snapkv"}, {"ratio": 2, "window": 8}, 4):
        with pytest.raises(TypeError, match="kv_compression must be True, False or"):
            SamplingParams(kv_compression=wrong)
