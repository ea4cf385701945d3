"""Calls that are watched by several at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.engine.observation import observer
from quire.observability.profiling.watched_calls import watch
from support.checkpoints import Checkpoints
from support.engines import make_llm


class Adder:
    def add(self, a: int, b: int = 1) -> int:
        return a + b


def times(factor: int) -> Callable[..., int]:
    return lambda call, *arguments, **options: factor * call(*arguments, **options)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_watchers_end_in_any_order_and_leave_nothing(order):
    adder = Adder()
    factors = [2, 3, 5]
    ends = [watch(adder, "add", times(factor)) for factor in factors]
    assert adder.add(1, b=2) == 3 * 2 * 3 * 5
    for index in order:
        ends[index]()
        factors[index] = 1
        assert adder.add(1) == 2 * factors[0] * factors[1] * factors[2]
    assert not vars(adder)


def test_what_hid_the_method_before_is_there_again():
    adder = Adder()
    adder.add = lambda a, b=1: 100  # type: ignore[method-assign]
    end = watch(adder, "add", times(2))
    assert adder.add(1) == 200
    end()
    assert adder.add(1) == 100


def test_a_watcher_may_end_itself_within_a_call():
    adder = Adder()

    def once(call: Callable[..., int], *arguments: Any) -> int:
        end()
        return 10 * call(*arguments)

    end = watch(adder, "add", once)
    assert (adder.add(1), adder.add(1)) == (20, 2)


@pytest.mark.parametrize("page_first", [True, False])
def test_the_page_and_a_profile_watch_the_same_core(checkpoints: Checkpoints, tmp_path, monkeypatch, page_first):
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path), "torch_profiler_with_stack": False}
    llm = make_llm(checkpoints.path("llama-gqa2-tied-llama3"), profiler_config=config)
    starts = [lambda: llm.core.look("viewer"), llm.start_profile]
    for start in starts if page_first else starts[::-1]:
        start()
    llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)
    assert b'"steps":[{"id"' in llm.core.look("viewer")
    monkeypatch.setattr(observer, "IDLE_SECONDS", -1.0)  # nobody looks any more
    llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)
    llm.stop_profile()
    llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)
    assert not {"schedule", "update"} & vars(llm.core.scheduler).keys()
    assert len(list(tmp_path.iterdir())) == 1
