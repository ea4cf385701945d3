"""What a GPU worker does with pictures before it measures memory, on any device."""

from __future__ import annotations

from functools import partial

from quire.engine.llm import LLM
from quire.messages.media import EncoderLimits, MediaItem
from quire.models.description import describe
from quire.multimodal.samples import largest_items
from support.engines import runner_of


def rehearsed(llm: LLM, limits: EncoderLimits) -> tuple[list[MediaItem], float]:
    """The items that were encoded, and how many vectors of the model the cache may need for each embedding."""
    runner, config, directory = runner_of(llm), llm.config, llm.frontend.directory
    media = describe(directory, config.model).spec.media
    assert media is not None
    make = partial(largest_items, media, directory, config.multimodal)
    runner.media._largest_items = make
    needed = runner.media.rehearse(limits)
    return list(make(limits)), needed / limits.capacity / runner.model.hidden_size / 4
