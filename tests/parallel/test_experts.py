"""How experts are divided among ranks by their loads."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.engine import ConfigError, EngineConfig
from quire.parallel.experts import ExpertRanks, balanced_slots, loads_of_ranks
from quire.parallel.mesh import Communicator


def first(experts: int, ranks: int, redundant: int = 0) -> list[int]:
    return ExpertRanks(Communicator(0, ranks), True, redundant).first_slots(experts)


def test_slots_that_are_left_over_have_second_copies():
    assert first(4, 2) == [0, 1, 2, 3]
    assert first(8, 3) == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert first(8, 4, redundant=4) == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert first(2, 4) == [0, 1, 0, 1]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 24), st.integers(1, 6), st.integers(0, 8), st.randoms(use_true_random=False))
def test_every_expert_keeps_a_slot_and_the_loads_are_about_equal(experts, ranks, redundant, rng):
    slots = first(experts, ranks, redundant)
    loads = [rng.choice([0, 1, 10, 1000]) * rng.random() for _ in range(experts)]
    new = balanced_slots(loads, slots, ranks, gain=0)
    assert len(new) == len(slots)
    assert set(new) == set(range(experts))
    # no rank has more than the mean and the load of one copy (the bound of greedy division)
    copies, sums = Counter(new), loads_of_ranks(loads, new, ranks)
    heaviest = max(loads[e] / copies[e] for e in range(experts))
    assert new == slots or max(sums) <= sum(loads) / ranks + heaviest + 1e-9 or len(slots) // ranks == 1
    assert max(sums) <= max(loads_of_ranks(loads, slots, ranks))
    assert sum(sums) == pytest.approx(sum(loads))


def test_the_division_is_near_the_best_one():
    rng = random.Random(0)
    for _ in range(20):
        loads = [rng.random() ** 3 for _ in range(8)]
        best = min(
            max(sum(loads[e] for e in half), sum(loads) - sum(loads[e] for e in half))
            for half in itertools.combinations(range(8), 4)
        )
        assert max(loads_of_ranks(loads, balanced_slots(loads, first(8, 2), 2), 2)) <= 1.12 * best


def test_the_expert_with_the_highest_load_gets_the_second_copy():
    new = balanced_slots([1.0, 9.0, 1.0], first(3, 2, redundant=1), 2)
    assert Counter(new)[1] == 2
    assert {1} <= set(new[:2])
    assert {1} <= set(new[2:])


def test_experts_with_equal_loads_stay_where_they_are():
    assert balanced_slots([1.0] * 8, first(8, 4), 4) == first(8, 4)


def test_an_expert_that_stays_on_its_rank_keeps_its_slot():
    loads = [8.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    slots = first(6, 2)
    new = balanced_slots(loads, slots, 2)
    for rank in (slice(0, 3), slice(3, 6)):
        for old, now in zip(slots[rank], new[rank], strict=True):
            assert now == old or old not in new[rank]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_eplb": True}, "enable_expert_parallel"),
        ({"eplb_config": {"windows": 3}}, "eplb_config has no field 'windows'"),
        ({"eplb_config": {"step_interval": 0}}, "eplb_config: step_interval must be at least 1, got 0"),
        ({"eplb_config": {"window_size": 10, "step_interval": 5}}, "eplb_config: window_size must be at most"),
        ({"enable_dbo": True}, "enable_dbo .* data_parallel_size"),
        ({"enable_dbo": True, "enable_expert_parallel": True}, "enable_dbo .* data_parallel_size"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.create(**options)
