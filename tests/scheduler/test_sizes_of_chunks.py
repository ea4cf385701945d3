"""How many tokens of a prompt a step computes: whole prompts, a threshold for long ones, and fewer requests at once."""

from __future__ import annotations

import pytest

from quire.config.conflicts import check
from quire.config.engine import ConfigError, EngineConfig
from quire.config.features import ModelFacts, Setup
from quire.engine.assemble import scheduler_limits
from quire.kv.specs import attention_spec
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import ModelRunnerOutput
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler
from support.engines import make_llm


def tokens_of_steps(limits: SchedulerLimits, prompts: list[int]) -> list[list[int]]:
    """The tokens of each request in each step, for prompts of these lengths, all of which get two tokens."""
    scheduler, made = Scheduler(limits, 64, [attention_spec([0], None)], 4, False), []
    for index, length in enumerate(prompts):
        params = SamplingParams(max_tokens=2)
        scheduler.add(EngineCoreRequest(str(index), [7] * length, params, 0, 2, None, [], 0.0, 0))
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        made.append(step.num_tokens)
        known = {r.row: len(r.token_ids) - r.num_computed_tokens for r in scheduler.running}
        sampled = [[9] if known[row] <= 0 else [] for row in step.rows]
        scheduler.update(ModelRunnerOutput(step.step_id, sampled))
    return made


def test_whole_prompts_wait_for_a_step_with_room():
    prompts = [20, 20, 30]
    assert tokens_of_steps(SchedulerLimits(8, 32, 40), prompts) == [[20, 12], [1, 8, 23], [1, 7], [1]]
    whole = tokens_of_steps(SchedulerLimits(8, 40, 40, whole_prompts=True), [20, 20, 30])
    assert whole == [[20, 20], [1, 1, 30], [1]]
    assert tokens_of_steps(SchedulerLimits(8, 40, 40, whole_prompts=True), [30, 20]) == [[30], [1, 20], [1]]


def test_an_adaptive_threshold_is_an_equal_share_of_the_step():
    fixed, adaptive = (
        SchedulerLimits(8, 32, 40, long_prefill_token_threshold=4, adaptive_threshold=given) for given in (False, True)
    )
    assert tokens_of_steps(fixed, [30])[0] == [4]
    assert tokens_of_steps(adaptive, [30])[0] == [30]
    assert tokens_of_steps(adaptive, [30, 30])[0] == [16, 16]
    assert tokens_of_steps(adaptive, [30] * 8)[0] == [4] * 8
    assert [adaptive.chunk(count) for count in (0, 1, 4, 100)] == [32, 32, 8, 4]


def limits_of(**options: object) -> SchedulerLimits:
    return scheduler_limits(EngineConfig.create(device="cpu", **options), 2048)


def test_the_options_of_vllm_set_the_limits():
    assert limits_of(max_num_active_seqs=3, max_num_seqs=8).max_num_seqs == 3
    assert limits_of(long_prefill_token_threshold=8, long_prefill_token_threshold_adaptive=True).adaptive_threshold
    whole = limits_of(enable_chunked_prefill=False)
    assert (whole.whole_prompts, whole.max_num_batched_tokens) == (True, 2048)
    assert not limits_of(enable_chunked_prefill=True).whole_prompts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_tokens": 512}, "raise max_num_batched_tokens to at least max_model_len"),
        ({"max_itl": 100}, "enable_chunked_prefill=False and max_itl exclude each other"),
        ({"long_prefill_token_threshold": 100}, "and long_prefill_token_threshold exclude each other"),
    ],
)
def test_whole_prompts_and_options_that_divide_them_exclude_each_other(options, message):
    with pytest.raises(ConfigError, match=message):
        check(Setup(EngineConfig.create(enable_chunked_prefill=False, **options), model=ModelFacts(max_model_len=2048)))


def test_more_requests_than_buffers_cannot_run():
    with pytest.raises(ConfigError, match=r"max_num_active_seqs must be at most max_num_seqs \(4\), got 5"):
        EngineConfig.create(max_num_seqs=4, max_num_active_seqs=5)


@pytest.mark.texts
@pytest.mark.parametrize("options", [{}, {"kv_compression": {"ratio": 2.0, "window": 16}}], ids=["plain", "compressed"])
def test_an_engine_computes_whole_prompts_and_says_the_same(options):
    prompts = [[5 + (i * j) % 90 for i in range(length)] for j, length in enumerate((100, 90, 120), 1)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    made = []
    for whole in (False, True):
        budget = {} if whole else {"max_num_batched_tokens": 48}
        llm = make_llm(None, max_model_len=128, max_num_seqs=4, enable_chunked_prefill=not whole, **budget, **options)
        before = llm.core.scheduler.stats.computed_tokens
        made.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
        assert llm.core.scheduler.stats.computed_tokens > before
        assert llm.core.scheduler.limits.max_num_batched_tokens == (512 if whole else 48)
    assert made[0] == made[1]
