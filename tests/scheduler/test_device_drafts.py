"""Drafts of a drafter on the device: the scheduler asks for them behind a step, and knows their number only."""

from __future__ import annotations

import pytest

from quire.kv.specs import attention_spec
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import ModelRunnerOutput
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.speculation import Speculation
from quire.speculation.lengths import DraftLengths


@pytest.mark.parametrize("drafts_stay", [True, False])
def test_drafts_are_in_the_next_step_if_they_stay_on_the_device(drafts_stay: bool) -> None:
    speculation = Speculation(None, DraftLengths(2), drafts_stay)
    limits = SchedulerLimits(4, 64, 64, lookahead=2)
    scheduler = Scheduler(limits, 64, [attention_spec([0])], 4, speculation=speculation)
    scheduler.add(EngineCoreRequest("a", [1, 2, 3], SamplingParams(), 0, 5))
    step = scheduler.schedule()
    assert (step.num_tokens, step.num_draft_tokens, step.num_next_drafts) == ([3], [], [2])
    scheduler.update(ModelRunnerOutput(step.step_id, [[7]]))
    step = scheduler.schedule()
    drafts = [2] if drafts_stay else []
    assert (step.num_tokens, step.num_draft_tokens) == ([1 + sum(drafts)], drafts)
    assert not step.draft_tokens.token_ids
