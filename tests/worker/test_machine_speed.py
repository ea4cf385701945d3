"""A measurement takes samples for a limited time, and notices a busy machine."""

from __future__ import annotations

import pytest
import torch

from quire.ops.cpu.build import library
from quire.worker import machine_speed
from quire.worker.machine_speed import CALL, KINDS, ROWS, KernelProbe, Measurement, Point, Sample, plan, thread_counts


class Machine:
    """A machine with the same rate for all products. slower: by sample, how many times as long it
    takes. busy: the share of the threads' time that other programs take."""

    def __init__(self, slower: tuple[float, ...] = (1.0,), busy: float = 0.0, rate: float = 1e10) -> None:
        self.now, self.taken, self._slower, self._busy, self._rate = 0.0, list[Point](), slower, busy, rate

    def __call__(self, point: Point) -> Sample:
        kind, threads, rows = point
        operations = 200 if kind == CALL else max(4e8, 2.0 * rows * 1024 * machine_speed.outs_of(threads))
        rate = 1e6 if kind == CALL else self._rate * threads
        seconds = operations / rate * self._slower[self.taken.count(point) % len(self._slower)]
        self.taken.append(point)
        self.now += seconds
        return Sample(operations, seconds, seconds * threads * (1 - self._busy))


def measured(machine: Machine, threads: int = 2, seconds: float = 2.0) -> Measurement:
    measurement = Measurement(threads, tuple(KINDS), machine, seconds, clock=lambda: machine.now)
    while measurement.proceed():
        pass
    return measurement


def test_the_fastest_of_several_rounds_counts():
    machine = Machine(slower=(3.0, 1.0, 1.02, 5.0, 1.5), rate=1e11)
    profile = measured(machine, seconds=100.0).profile()
    assert profile.is_quiet
    assert profile.rates.keys() == KINDS.keys()
    for rates in profile.rates.values():
        assert {count: sorted(rows) for count, rows in rates.items()} == {1: [1, 512], 2: sorted(ROWS)}
        assert rates[2] == pytest.approx(dict.fromkeys(ROWS, 2e11))
        assert rates[1] == pytest.approx({1: 1e11, 512: 1e11})
    assert profile.calls == pytest.approx({1: 1e-6, 2: 1e-6})
    assert profile.noise == pytest.approx(0.02)
    assert {machine.taken.count(point) for point in machine.taken} == {5}


def test_other_programs_are_noticed():
    changing = measured(Machine(slower=(1.0, 1.3, 1.2, 1.5, 2.0), rate=1e11)).profile()
    assert not changing.is_quiet
    crowded = measured(Machine(busy=0.4, rate=1e11)).profile()
    assert not crowded.is_quiet


@pytest.mark.parametrize("threads", [1, 2, 16, 64])
@pytest.mark.parametrize("rate", [1e9, 1e10, 1e11])
def test_the_time_is_limited(threads, rate):
    machine = Machine(rate=rate)
    measured(machine, threads)
    assert machine.now < 2.0 + 4e8 / rate + 0.15


@pytest.mark.parametrize(("rate", "seconds"), [(1e9, 2.0), (1e10, 0.0)])
def test_too_little_time_is_as_a_busy_machine(rate, seconds):
    profile = measured(Machine(rate=rate), seconds=seconds).profile()
    assert not profile.is_quiet
    assert profile.rates == {}


def test_samples_that_would_take_long_are_left_out():
    profile = measured(Machine(rate=4e9), threads=1, seconds=60.0).profile()
    assert sorted(profile.rates["dense"][1]) == sorted(ROWS)[:-1]


def test_numbers_of_threads_are_powers_of_two_and_parts_of_all():
    assert thread_counts(1) == [1]
    assert thread_counts(2) == [1, 2]
    assert thread_counts(6) == [1, 2, 3, 4, 6]
    assert thread_counts(64) == [1, 2, 4, 8, 16, 32, 48, 64]
    assert {count for _, count, _ in plan(6, ("dense",))} == {1, 2, 3, 4, 6}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that take microseconds."""
    monkeypatch.setattr(machine_speed, "_IN", 64)
    monkeypatch.setattr(machine_speed, "_OUT", 2048)
    monkeypatch.setattr(machine_speed, "_OPERATIONS", 1e6)
    monkeypatch.setattr(machine_speed, "_CALLS", 2)


@pytest.mark.skipif(library() is None, reason="no compiled kernels")
def test_the_kernels_are_measured(small):
    before, state = torch.get_num_threads(), torch.random.get_rng_state()
    probe = KernelProbe()
    assert probe.kinds == tuple(KINDS)
    measurement = Measurement(2, probe.kinds, probe, seconds=60.0)
    while measurement.proceed():
        pass
    profile = measurement.profile()
    assert {kind: sorted(rates) for kind, rates in profile.rates.items()} == {kind: [1, 2] for kind in KINDS}
    assert torch.get_num_threads() == before
    assert torch.equal(torch.random.get_rng_state(), state)  # a user's own numbers stay the same


def test_without_compiled_kernels_torch_is_measured(small, monkeypatch):
    monkeypatch.setattr(machine_speed, "library", lambda: None)
    monkeypatch.setattr("quire.ops.memory.library", lambda: None)
    monkeypatch.setattr("quire.ops.cpu.elementwise.library", lambda: None)
    probe = KernelProbe()
    assert probe.kinds == ("dense",)
    assert isinstance(probe._weights("dense"), torch.Tensor)
    assert probe(("dense", 1, 16)).operations >= 2 * 16 * 64 * 256
    assert probe(("dense", 1, 1)).seconds > 0
    assert probe((CALL, 1, 1)).operations in (1, 2)  # one if it takes long
