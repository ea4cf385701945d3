"""Suspects run one after another, and the journal names the one that is on trial."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.core_client import LONG_RUN, MAX_LOSSES, CoreClient, _Unfinished
from quire.engine.trials import read_journal
from quire.messages.engine import CoreDied, EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from support.engines import core_request, make_llm

TOKENS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoints):
    return make_llm(checkpoints.path("llama"))


@pytest.fixture
def core(llm, tmp_path: Path):
    llm.core.trials.journal = tmp_path / "on-trial"
    yield llm.core
    assert not llm.core.trials.is_active
    assert not llm.core.has_unfinished


def add(llm, name: str, trial: int = 0) -> None:
    llm.core.add_request(msgspec.structs.replace(core_request(llm, name, [5, 6, 7], TOKENS), trial=trial))


def on_trial(core: EngineCore) -> str:
    return read_journal(core.trials.journal) or ""


def history(core: EngineCore) -> list[tuple[str, list[str]]]:
    """Which request was on trial during each step, and which had an output."""
    steps = []
    while core.has_unfinished:
        before = on_trial(core)
        steps.append((before, sorted(output.request_id for output in core.step() if output.new_token_ids)))
    return steps


def test_requests_that_are_no_suspects_run_at_once(llm, core):
    for name in "abc":
        add(llm, name)
    assert history(core)[0] == ("", ["a", "b", "c"])


@pytest.mark.plain("counts steps")
def test_suspects_start_one_after_another_behind_the_others(llm, core):
    add(llm, "a")
    add(llm, "s", 1)
    add(llm, "t", 1)
    add(llm, "later")
    first, second, third, fourth, *_ = history(core)
    assert first == ("", ["a"])
    assert second == ("s", ["a", "s"])
    assert third == ("t", ["a", "s", "t"])
    assert fourth == ("", ["a", "later", "s", "t"])


@pytest.mark.plain("counts steps")
def test_a_suspect_is_on_trial_for_as_many_tokens_as_it_must_output(llm, core):
    add(llm, "s", 3)
    add(llm, "t", 1)
    assert [trial for trial, _ in history(core)][:4] == ["s", "s", "s", "t"]


def test_an_aborted_suspect_makes_room_for_the_next(llm, core):
    add(llm, "s", 1)
    add(llm, "t", 1)
    assert on_trial(core) == "s"
    core.abort_requests(["s"])
    assert on_trial(core) == "t"
    core.abort_requests(["t"])
    assert on_trial(core) == ""


def test_an_aborted_request_in_front_does_not_hold_up_the_others(llm, core):
    add(llm, "s", 1)
    add(llm, "t", 1)
    add(llm, "later")
    core.abort_requests(["t"])
    assert "later" in {name for _, names in history(core) for name in names}


# ---- who is charged


class Client(CoreClient):
    def __init__(self, **options: object) -> None:
        self.config = EngineConfig.create(**options)


def lost(name: str, progress: int, losses: int = 0) -> _Unfinished:
    request = EngineCoreRequest(name, [1], None, 0, 0)
    return _Unfinished(request, token_ids=[1] * (3 + progress), num_sent=3, losses=losses)


def names(requests: list[_Unfinished]) -> list[str]:
    return [unfinished.request.request_id for unfinished in requests]


def test_only_requests_without_progress_are_charged():
    runs, new = lost("runs", 5), lost("new", 0)
    assert Client()._charge([runs, new], CoreDied("killed")) == []
    assert (runs.losses, runs.trial) == (0, 0)
    assert (new.losses, new.trial) == (1, 1)


def test_requests_that_all_made_progress_run_together_after_their_first_loss():
    requests = [lost("a", 5), lost("b", 9)]
    assert Client()._charge(requests, CoreDied("killed")) == []
    assert [(r.losses, r.trial) for r in requests] == [(1, 0), (1, 0)]


def test_they_are_on_trial_after_the_second_one_for_longer_than_they_ran():
    requests = [lost("a", 5, losses=1), lost("b", 9, losses=1)]
    assert Client()._charge(requests, CoreDied("killed")) == []
    assert [r.trial for r in requests] == [6, 10]


def test_they_are_on_trial_at_once_if_the_core_hung_or_if_there_is_only_one():
    requests = [lost("a", 5), lost("b", 9)]
    Client()._charge(requests, CoreDied("hangs", silent=True))
    assert all(r.trial for r in requests)
    alone = lost("a", 5)
    Client()._charge([alone], CoreDied("killed"))
    assert alone.trial


def test_the_request_on_trial_is_the_only_one_that_ends():
    requests = [lost("runs", 5), lost("culprit", 0, 1), lost("waits", 0, MAX_LOSSES)]
    requests[2].trial = 1
    assert names(Client()._charge(requests, CoreDied("killed", culprit="culprit"))) == ["culprit"]
    assert [r.losses for r in requests] == [0, 1, MAX_LOSSES]
    assert requests[2].trial == 1


def test_the_losses_of_a_request_are_bounded():
    requests = [lost("a", 5, losses=MAX_LOSSES), lost("b", 9, losses=1)]
    assert names(Client()._charge(requests, CoreDied("killed"))) == ["a"]


def test_a_request_that_ran_for_long_starts_anew():
    long = lost("a", LONG_RUN, losses=MAX_LOSSES)
    assert Client()._charge([long], CoreDied("killed")) == []
    assert long.losses == 1


def test_nobody_is_on_trial_among_replicas_that_share_experts():
    client = Client(enable_expert_parallel=True, data_parallel_size=2)
    first, second = lost("a", 0), lost("b", 0, losses=1)
    assert names(client._charge([first, second], CoreDied("killed"))) == ["b"]
    assert first.trial == 0
