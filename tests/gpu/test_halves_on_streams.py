"""The two halves of a step on a GPU that is not there: which stream gets their work, and what waits for what."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")
from support.stand_in import run_on_stand_in

pytestmark = pytest.mark.slow


def test_the_second_half_has_its_own_stream_and_follows_the_first_one():
    printed = run_on_stand_in("""
        import json
        import torch
        from quire.parallel.step_halves import Halves
        torch.cuda.init()
        x = torch.zeros(4, device="cuda")
        log, streams, order = [], [torch.cuda.current_stream()], device.streams.order

        def number(stream):
            if stream not in streams:
                streams.append(stream)
            return streams.index(stream)

        def waits(later, earlier, *, is_captured):
            log.append(["wait", number(later), number(earlier)])
            order(later, earlier, is_captured=is_captured)

        device.streams.order = waits
        halves = Halves()

        def half(name, layers):
            def work():
                for layer in range(layers):
                    x.add(1)
                    log.append([name, layer, number(torch.cuda.current_stream())])
                    halves.pass_on()
                return name
            return work

        assert halves.run(half("first", 2), half("second", 2)) == ("first", "second")
        once = list(log)
        log.clear()
        def fails():
            raise ValueError("on purpose")
        try:
            halves.run(half("first", 1), fails)
        except ValueError as error:
            log.append([str(error)])
        log.append(["after", number(torch.cuda.current_stream())])
        print(json.dumps([once, log]))
    """)
    once, failed = json.loads(printed.splitlines()[-1])
    assert once == [
        ["first", 0, 0],
        ["wait", 1, 0],
        ["second", 0, 1],
        ["first", 1, 0],
        ["wait", 1, 0],
        ["second", 1, 1],
        ["wait", 1, 0],  # the first half has ended
        ["wait", 0, 1],
    ]
    assert failed == [["first", 0, 0], ["wait", 1, 0], ["wait", 0, 1], ["on purpose"], ["after", 0]]
