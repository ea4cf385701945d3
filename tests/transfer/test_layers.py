"""Blocks that are read layer by layer while a step of another engine computes them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from quire.messages.transfers import Transfer
from quire.transfer import server, store
from quire.worker.step_clock import ALL_LAYERS, NOT_RUN, StepClock
from support.clock import Clock
from support.kv_peers import GQA, LATENTS, WINDOWS, Consumer, CopiedRows, Make, Producer, content, heads
from support.server import eventually
from support.waiting import LONGEST

STEP = 5
TRANSPORTS = [
    pytest.param({"shared": True}, {"transports": ["shared_memory"]}, id="shared memory"),
    pytest.param({}, {"transports": ["tcp"]}, id="tcp"),
    pytest.param({"rows": CopiedRows}, {"transports": ["tcp"], "rows": CopiedRows}, id="devices"),
]


class Reading:
    """A load that waits for a step of the producer."""

    def __init__(self, consumer: Consumer, order: Transfer) -> None:
        self.consumer, self.order, self.results = consumer, order, list[list[list[int]]]()
        self._thread = threading.Thread(target=lambda: self.results.append(consumer.load(order)))
        self._thread.start()

    def has(self, layer: int) -> bool:
        """Whether the first rank has a layer of all blocks."""
        blocks, layout = self.consumer.blocks[0].numpy(), self.consumer.layouts[0]
        return all(
            bytes(blocks[block, offset : offset + size]) == content(group, layer, head, slot, size)
            for block, slot, (of_block, _) in zip(self.order.block_ids, self.order.slots, self.order.keys, strict=True)
            for group, number, head, offset, size in heads(layout)
            if (group, number) == (of_block, layer)
        )

    def result(self) -> list[list[int]]:
        self._thread.join(LONGEST)
        return self.results[0]


@pytest.fixture
def make_computing(make: Make) -> Make:
    """Makes a producer that has still to compute its blocks, and a consumer."""

    def both(
        *arguments: object, producer: dict[str, object] | None = None, **consumer: object
    ) -> tuple[Producer, Consumer]:
        return make(*arguments, producer={"computes": True, **(producer or {})}, **consumer)

    return both


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("producing", "consuming"), TRANSPORTS)
@pytest.mark.parametrize("model", [GQA, LATENTS, WINDOWS], ids=["gqa", "latents", "windows"])
@pytest.mark.parametrize(("theirs", "ours"), [((1, 1), (1, 1)), ((2, 2), (1, 1)), ((1, 1), (2, 1)), ((1, 2), (1, 2))])
def test_layers_are_read_when_they_have_been_computed(
    make_computing: Make, producing, consuming, model, theirs, ours
) -> None:
    producer, consumer = make_computing(model, theirs, ours, producer=producing, **consuming)
    reading = Reading(consumer, producer.order())
    for clock in producer.clocks:
        clock.begin(STEP)
    num_own = model.layers // ours[1]
    for layer in range(model.layers):
        if layer < num_own:
            assert not reading.has(layer)
        producer.compute(layer)
        if layer < num_own:
            eventually(lambda layer=layer: reading.has(layer))
    if ours == (1, 1):
        assert reading.result() == [[]], "it need not wait for the end of the step"
    for clock in producer.clocks:
        clock.end(has_run=True)
    assert reading.result() == [[]] * len(consumer.stores)
    consumer.check(reading.order)
    again = producer.order(seed=1)
    assert consumer.load(again) == [[]] * len(consumer.stores), "the step ended before it was asked for"


@pytest.mark.parametrize(("producing", "consuming"), TRANSPORTS)
def test_a_step_that_was_not_run_is_not_read(make_computing: Make, producing, consuming) -> None:
    producer, consumer = make_computing(producer=producing, **consuming)
    (clock,) = producer.clocks
    reading = Reading(consumer, producer.order())
    clock.begin(STEP)
    clock.end(has_run=False)
    assert reading.result() == [list(range(7))]
    clock.begin(STEP + 4)
    missing = producer.order()
    missing.step = STEP + 2
    assert consumer.load(missing) == [list(range(7))]
    for layer in range(GQA.layers):
        producer.compute(layer)
    later = producer.order()
    later.step = STEP + 4
    assert consumer.load(later) == [[]], "the connection is still in use"
    consumer.check(later)


def test_a_rank_that_stands_still_is_given_up(make_computing: Make, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    seconds, num_asked = Clock(), 0
    monkeypatch.setattr(store, "time", seconds)
    monkeypatch.setattr(server, "AWAIT_SECONDS", 0.01)
    producer, consumer = make_computing()
    (clock,) = producer.clocks
    wait = clock.wait

    def count(*arguments: Any) -> tuple[int, int]:
        nonlocal num_asked
        num_asked += 1
        return wait(*arguments)

    def pass_time(by: float) -> None:
        """Let so much time pass when the reader knows how far the step is."""
        before = num_asked
        eventually(lambda: num_asked >= before + 2)
        seconds.now += by

    monkeypatch.setattr(clock, "wait", count)
    reading = Reading(consumer, producer.order())
    for step_id in range(1, STEP):
        clock.begin(step_id)
        pass_time(0.9 * store._STILL_SECONDS)
        clock.end(has_run=True)
    pass_time(0.0)
    assert not reading.results, "it goes on with other steps"
    pass_time(1.1 * store._STILL_SECONDS)
    assert reading.result() == [list(range(7))]
    assert "has not been run for too long" in caplog.text


def test_closing_ends_a_wait(make_computing: Make) -> None:
    producer, consumer = make_computing()
    reading = Reading(consumer, producer.order())
    eventually(lambda: any(link.clocks for link in consumer.stores[0]._links.values()))
    consumer.close()
    assert reading.result() == [list(range(7))]


def test_a_clock_says_how_far_each_step_is() -> None:
    waited = []
    clock = StepClock(range(4, 7), lambda: lambda number=clock.ticks: waited.append(number))

    def at(step_id: int, layer: int = ALL_LAYERS) -> int:
        return clock.wait(step_id, layer, 0.0)[0]

    assert at(3) == 4
    clock.begin(3)
    assert at(3) == 4
    clock.layer_done()
    assert at(3) == 5
    assert waited == [0], "the device may be behind"
    clock.layer_done()
    clock.layer_done()
    assert at(3) == ALL_LAYERS
    clock.end(has_run=True)
    assert (at(3), at(3, 5)) == (ALL_LAYERS, ALL_LAYERS)
    assert (at(2), at(4)) == (NOT_RUN, 4)
    clock.begin(6)
    assert (at(4), at(5), at(6), at(7)) == (NOT_RUN, NOT_RUN, 4, 4)
    clock.end(has_run=False)
    assert (at(3), at(6)) == (ALL_LAYERS, NOT_RUN)
    clock.begin(1 << 20)
    clock.end(has_run=True)
    assert (at(3), at((1 << 20) - 5), at(1 << 20)) == (NOT_RUN, NOT_RUN, ALL_LAYERS)
