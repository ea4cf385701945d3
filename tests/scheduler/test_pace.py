"""Steps stay short while requests wait for their next token, if that is asked for."""

from __future__ import annotations

import pytest
from test_scheduler import answer, make_request

from quire.config.engine import ConfigError
from quire.kv.specs import CacheEntry, FullAttentionSpec
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.pace import Pace
from quire.scheduler.scheduler import Scheduler
from support.checkpoints import FAMILIES
from support.engines import generate, make_llm, tokens_of
from support.reference import prompts


@pytest.mark.parametrize("reading", [0.0, 0.03])
@pytest.mark.parametrize("token", [0.0001, 0.002])
def test_steps_come_to_take_the_time_that_was_asked_for(reading, token):
    pace = Pace(0.1)
    for _ in range(30):
        tokens = int(pace.tokens)
        pace.observe(tokens + 4, 4, reading + token * tokens)
    assert reading + token * int(pace.tokens) == pytest.approx(0.1, rel=0.1)


def test_one_disturbed_step_does_not_stop_prompts():
    pace = Pace(0.1)
    for _ in range(20):
        pace.observe(1000, 0, 0.1)
    pace.observe(1000, 0, 60.0)
    assert pace.tokens == pytest.approx(500)
    for _ in range(20):
        pace.observe(1000, 0, 60.0)
    assert pace.tokens == 16


def test_small_steps_say_nothing_about_larger_ones():
    pace = Pace(0.1)
    pace.observe(8, 8, 5.0)
    assert pace.tokens == 64


def test_only_prompts_beside_streams_are_divided():
    limits = SchedulerLimits(4, 256, 1024, pace=Pace(0.1))
    scheduler = Scheduler(limits, 512, [FullAttentionSpec((CacheEntry(0),))], 4)
    sizes = []
    for number, length in enumerate([300, 300]):
        scheduler.add(make_request(f"r{number}", [10 + number] * length, max_tokens=100))
        for _ in range(6):
            step = scheduler.schedule()
            sizes.append(sum(step.num_tokens))
            past = {r.row: r.num_computed_tokens >= r.num_prompt_tokens for r in scheduler.running}
            answer(scheduler, step, *(7 if past[row] else None for row in step.rows))
    assert sizes == [256, 44, 1, 1, 1, 1, 65, 66, 66, 66, 42, 2]


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}])
def test_answers_are_the_same(checkpoints, options):
    path, texts = checkpoints.path(FAMILIES["llama"][0]), prompts(300, 6)
    expected = tokens_of(generate(make_llm(path), texts))
    assert tokens_of(generate(make_llm(path, max_itl=1, max_num_seqs=3, **options), texts)) == expected


def test_what_needs_whole_steps_is_refused(checkpoints):
    path = checkpoints.path(FAMILIES["llama"][0])
    with pytest.raises(ConfigError, match="max_itl"):
        make_llm(path, max_itl=100, kv_compression={"ratio": 4})
    with pytest.raises(ConfigError, match="max_itl must be an integer of at least 1"):
        make_llm(path, max_itl=0)
