"""Ranks that read, and ranks that are read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.kv_peers import GQA, Consumer, Make, ModelModel, Producer


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a producer and a consumer, and closes them."""
    made: list[Producer | Consumer] = []

    def both(
        model: ModelModel = GQA,
        theirs: tuple[int, int] = (1, 1),
        ours: tuple[int, int] = (1, 1),
        producer: dict[str, object] | None = None,
        **consumer: object,
    ) -> tuple[Producer, Consumer]:
        pair = Producer(model.layouts(*theirs), **(producer or {})), Consumer(model.layouts(*ours), **consumer)  # type: ignore[arg-type]
        made.extend(pair)
        return pair

    yield both
    for thing in reversed(made):
        thing.close()
