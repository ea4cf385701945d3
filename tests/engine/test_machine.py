"""An engine chooses threads and the size of steps by the profile of its machine, and measures it when it is idle."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.engine import ConfigError, EngineConfig
from quire.engine import machine
from quire.engine.assemble import scheduler_limits
from quire.engine.machine import IdleMeasurement, Machine
from quire.executor import threads
from quire.models.description import describe
from quire.platform.machine_profile import MachineProfile
from quire.worker.machine_speed import CALL, KINDS, Measurement, Point, Sample, outs_of
from support import machine_profiles
from support.checkpoints import FAMILIES
from support.machine_profiles import MONDAY

profile = partial(machine_profiles.profile, call=1e-12)  # the time of a tiny model would be that of calls


def short_steps(**changes: Any) -> MachineProfile:
    """A machine whose products of more than 256 rows are slower."""
    made = profile(2, best=256, **changes)
    rates = {count: {n: r * (0.9 if n > 256 else 1) for n, r in of.items()} for count, of in made.rates["int8"].items()}
    return replace(made, rates=dict.fromkeys(KINDS, rates))


NOISY = (1.0, 1.5, 2.0, 3.0, 4.0)
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 128}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[MachineProfile | None]:
    """The profile that is kept for this machine, which may be replaced. The options choose nothing."""
    kept: list[MachineProfile | None] = [profile(2, best=1024)]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "read_profile", lambda key: kept[0])
    monkeypatch.setattr(machine.time, "time", lambda: MONDAY + 60)
    monkeypatch.setattr(machine, "most_threads", lambda: 2)
    monkeypatch.setattr(threads, "processors", lambda: 2)
    return kept


@pytest.fixture
def set_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of threads that torch has been given. It has two before."""
    given = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: given[-1])
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    return given


def of(checkpoints: Any, shares_experts: bool = False, **options: Any) -> Machine:
    path = checkpoints.path(FAMILIES["llama"][0])
    config = EngineConfig.create(model=str(path), **OPTIONS, **options)
    return Machine(config, describe(path, config.model), path, shares_experts=shares_experts)


def tokens(of_machine: Machine) -> int | None:
    return of_machine.with_tokens_of_a_step().scheduler.max_num_batched_tokens


def test_steps_and_threads_follow_from_the_profile(checkpoints, found):
    assert tokens(of(checkpoints)) == 1024
    assert of(checkpoints).threads == 2
    found[0] = short_steps(speedup=0)
    assert tokens(of(checkpoints)) == 384
    assert of(checkpoints).threads == 1
    assert tokens(of(checkpoints, max_num_seqs=64)) == 256


def test_options_win(checkpoints, found, monkeypatch):
    assert tokens(of(checkpoints, max_num_batched_tokens=300)) == 300
    assert of(checkpoints, max_num_batched_tokens=300).threads == 2
    assert tokens(of(checkpoints, threads=2)) is None
    assert tokens(of(checkpoints, enable_chunked_prefill=False)) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert tokens(of(checkpoints)) is None


@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 1, "max_num_batched_tokens": 300}])
def test_a_machine_whose_threads_are_chosen_is_not_measured(checkpoints, found, options):
    found[0] = None
    assert of(checkpoints).measurement is not None
    assert of(checkpoints, **options).measurement is None


def test_a_machine_whose_processors_do_not_run_the_model_is_not_measured(checkpoints, found, monkeypatch):
    found[0] = None
    monkeypatch.setattr(machine, "uses_gpu", lambda config: True)
    assert of(checkpoints).measurement is None


@pytest.mark.parametrize(
    "options",
    [{"enable_prompt_embeds": True}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}],
)
def test_steps_do_not_become_too_short_for_what_needs_room(checkpoints, found, options):
    found[0] = short_steps()
    assert tokens(of(checkpoints)) == 384
    assert tokens(of(checkpoints, **options)) == 512


def test_replicas_that_share_experts_have_steps_of_the_same_size(checkpoints, found):
    assert tokens(of(checkpoints, shares_experts=True)) is None


@pytest.mark.parametrize(
    ("changes", "is_measured"),
    [({"noise": 0.3}, False), ({"noise": 0.3, "measured_at": MONDAY - 7200}, True), ({"measured_at": 0.0}, True)],
)
def test_a_busy_or_an_old_machine_is_measured_again(checkpoints, found, changes, is_measured):
    found[0] = replace(profile(2, best=1024), **changes)
    chosen = of(checkpoints)
    assert (chosen.measurement is not None) == is_measured
    assert tokens(chosen) == (1024 if found[0].is_quiet else None)


def test_other_types_than_those_measured_have_the_usual_steps(checkpoints, found):
    assert tokens(of(checkpoints, dtype="float32")) is None


def test_the_pace_begins_with_what_fits_the_time(checkpoints, found):
    chosen = of(checkpoints, max_itl=50)
    assert chosen.estimate is not None
    pace = scheduler_limits(chosen.with_tokens_of_a_step(), 128, chosen.estimate).pace
    assert pace is not None
    assert pace.tokens == chosen.estimate.tokens_within(0.05) > 64
    unknown = scheduler_limits(EngineConfig.create(max_itl=50, **OPTIONS), 128).pace
    assert unknown is not None
    assert unknown.tokens == 64


def test_an_engine_uses_them_and_its_text_is_the_same(checkpoints, found, set_threads, caplog):
    path, params = str(checkpoints.path(FAMILIES["llama"][0])), SamplingParams(max_tokens=8, temperature=0)
    prompt = {"prompt_token_ids": list(range(3, 90))}
    texts, sizes = [], []
    for kept in (profile(2, best=2048, speedup=0), short_steps(speedup=0)):
        found[0] = kept
        with caplog.at_level(logging.INFO, "quire"):
            llm = LLM(path, max_num_seqs=4, num_gpu_blocks_override=40, **OPTIONS)
        texts.append(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
        sizes.append(llm.core.scheduler.limits.max_num_batched_tokens)
        assert llm.core.measurement is None
        llm.shutdown()
    assert texts[0] == texts[1]
    assert sizes == [2048, 256]
    assert set_threads[-1] == 1
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Threads")]
    assert lines == [
        f"Threads: 1, steps of up to {size} tokens: as this machine was measured on 2026-11-30"
        for size in ("2,048", "256")
    ]


def test_the_option_is_divided_among_replicas(set_threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for replicas in (1, 2, 3, 16):
        threads.limit_threads(replicas, 8, 4)
    assert set_threads[1:] == [8, 4, 2, 1]
    with pytest.raises(ConfigError, match="threads must be an integer of at least 1, got 0"):
        EngineConfig.create(threads=0)


def test_the_best_number_of_threads_is_divided_among_replicas(set_threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "processors", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    for replicas in (1, 2, 16):
        threads.limit_threads(replicas, None, 8)
    assert set_threads[1:] == [8, 4, 1]


# ---- measuring


class Probe:
    """A machine that multiplies at a constant rate. slower: the factors of its rounds."""

    kinds, compiled = tuple(KINDS), True

    def __init__(self, slower: tuple[float, ...] = (1.0,)) -> None:
        self._slower, self._taken = slower, list[Point]()

    def __call__(self, point: Point) -> Sample:
        kind, count, rows = point
        operations = 200 if kind == CALL else 2.0 * rows * 1024 * outs_of(count)
        seconds = operations / 1e12 * self._slower[self._taken.count(point) % len(self._slower)]
        self._taken.append(point)
        return Sample(operations, seconds, seconds * count)


class Idle:
    """An idle engine: its clock, its probes, and what it keeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.kept = 0.0, list[MachineProfile]()
        monkeypatch.setattr(machine, "free_on_host", lambda: 1 << 40)
        monkeypatch.setattr(machine, "can_keep_profile", lambda: True)
        monkeypatch.setattr(machine, "find_library", lambda: "kernels")
        monkeypatch.setattr(machine, "write_profile", lambda key, made: self.kept.append(made))

    def measurement(self, *probes: Probe, found: MachineProfile | None = None) -> IdleMeasurement:
        waiting = list(probes)
        return IdleMeasurement("key", 2, found, make_probe=lambda: waiting.pop(0), clock=lambda: self.now)  # type: ignore

    def rest(self, measurement: IdleMeasurement, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            while measurement.is_due():
                measurement.proceed()


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Idle:
    return Idle(monkeypatch)


def test_a_machine_is_measured_once_the_engine_has_rested(idle):
    measurement = idle.measurement(Probe())
    idle.rest(measurement, 4)
    assert idle.kept == []
    measurement.interrupt()
    idle.rest(measurement, 4)
    assert idle.kept == []
    idle.rest(measurement, 2)
    assert len(idle.kept) == 1
    assert idle.kept[0].is_quiet
    idle.rest(measurement, 10_000)
    assert len(idle.kept) == 1


def test_work_ends_a_measurement_that_is_begun_anew(idle):
    measurement = idle.measurement(Probe((1.0, 9.0)), Probe())
    idle.now = 6.0
    for _ in range(40):
        assert measurement.is_due()
        measurement.proceed()
    measurement.interrupt()
    assert not measurement.is_due()
    idle.rest(measurement, 6)
    assert [made.is_quiet for made in idle.kept] == [True]


def test_a_busy_machine_is_measured_three_times_at_most(idle):
    measurement = idle.measurement(Probe(NOISY), Probe(NOISY), Probe(NOISY))
    idle.rest(measurement, 6)
    assert [made.is_quiet for made in idle.kept] == [False]
    idle.rest(measurement, 50)
    assert len(idle.kept) == 1
    idle.rest(measurement, 10_000)
    assert len(idle.kept) == 3
    assert measurement.result is idle.kept[2]


def test_a_busy_machine_keeps_what_was_measured_before(idle):
    measurement = idle.measurement(Probe(NOISY), Probe(NOISY), Probe(), found=profile())
    idle.rest(measurement, 100)
    assert idle.kept == []
    idle.rest(measurement, 1_000)
    assert [made.is_quiet for made in idle.kept] == [True]


def test_nothing_is_measured_where_it_cannot_be_kept_or_memory_is_short(idle, monkeypatch):
    measurement = idle.measurement()
    monkeypatch.setattr(machine, "can_keep_profile", lambda: False)
    idle.rest(measurement, 1_000)
    monkeypatch.setattr(machine, "can_keep_profile", lambda: True)
    monkeypatch.setattr(machine, "free_on_host", lambda: 1 << 20)
    idle.rest(idle.measurement(), 1_000)
    assert idle.kept == []


def test_a_folder_that_becomes_read_only_costs_nothing_but_time(idle, monkeypatch, caplog):
    monkeypatch.setattr(machine, "write_profile", lambda key, made: "Read-only file system")
    with caplog.at_level(logging.DEBUG, "quire"):
        idle.rest(idle.measurement(Probe()), 1_000)
    assert "The profile of this machine is not kept: Read-only file system" in caplog.text


def test_a_command_measures_at_once(idle):
    measurement = idle.measurement(Probe(), Probe())
    assert measurement.is_needed
    measurement.finish()
    assert idle.kept == [measurement.result]
    assert not measurement.is_needed
    assert idle.measurement(found=profile(noise=0.2)).is_needed


def test_a_machine_that_leaves_no_time_is_not_measured_at_every_start(idle, checkpoints, found, monkeypatch):
    monkeypatch.setattr(machine, "Measurement", partial(Measurement, seconds=0.0))
    idle.measurement(Probe()).finish()
    assert [made.rates for made in idle.kept] == [{}]
    found[0] = replace(idle.kept[0], measured_at=MONDAY)
    assert of(checkpoints).measurement is None
    assert tokens(of(checkpoints)) is None


def test_the_core_of_an_engine_has_its_measurement(checkpoints, found, monkeypatch):
    found[0] = None
    llm = LLM(str(checkpoints.path(FAMILIES["llama"][0])), max_num_seqs=4, num_gpu_blocks_override=40, **OPTIONS)
    assert llm.core.measurement is not None
    assert llm.core.has_rest
    llm.shutdown()


def test_the_key_depends_on_the_kernels(monkeypatch, tmp_path):
    before = machine.current_key("native")
    assert before == machine.current_key("native") != machine.current_key("avx2")
    monkeypatch.setattr(machine, "SOURCES", tmp_path)
    assert machine.current_key("native") != before


def test_kernels_are_measured_when_they_are_there(idle, monkeypatch):
    monkeypatch.setattr(machine, "find_library", lambda: None)
    monkeypatch.setattr(machine, "find_compiler", lambda: ["g++"])
    measurement = idle.measurement(Probe(), found=profile(compiled=False))
    idle.rest(measurement, 10)
    assert idle.kept == []
    monkeypatch.setattr(machine, "find_library", lambda: "kernels")
    idle.rest(measurement, 100)
    assert [made.compiled for made in idle.kept] == [True]


def test_without_a_compiler_torch_is_measured_once(idle, monkeypatch):
    monkeypatch.setattr(machine, "find_library", lambda: None)
    monkeypatch.setattr(machine, "find_compiler", lambda: None)
    monkeypatch.setattr(machine.time, "time", lambda: MONDAY + 60)
    idle.rest(idle.measurement(found=profile(compiled=False)), 1_000)
    assert idle.kept == []
    idle.rest(idle.measurement(Probe()), 1_000)
    assert len(idle.kept) == 1
