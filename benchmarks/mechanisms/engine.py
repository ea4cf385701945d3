"""Runs requests on the bundled model, step by step, and records the work of each step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire import LLM, SamplingParams
from quire.messages.lora import Adapter
from quire.messages.step import SchedulerOutput

VOCABULARY = range(10, 4000)  # ordinary tokens of the bundled model


def tokens(count: int, seed: int) -> list[int]:
    """Return a prompt of `count` random tokens."""
    return random.Random(seed).choices(VOCABULARY, k=count)


@dataclass
class Arrival:
    """A request that arrives before a step. params: its sampling parameters; by default, it generates
    `output` tokens.
    """

    step: int
    name: str
    prompt: list[int] | str
    output: int = 1
    priority: int = 0
    adapter: Adapter | None = None
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(**{"temperature": 0, "max_tokens": self.output, "ignore_eos": True, **self.params})


@dataclass(frozen=True)
class Part:
    """The tokens of one request in a step, beginning at position `start`. The first `known` were already known."""

    name: str
    start: int
    count: int
    prompt: int
    drafts: int
    sampled: int


def engine(**options: Any) -> LLM:
    """Return an engine with the bundled model in float32 and one step in flight."""
    return LLM(**{"dtype": "float32", "async_scheduling": False, "max_model_len": 2048, **options})


def run(
    llm: LLM, arrivals: Sequence[Arrival], watch: Callable[[list[Part], SchedulerOutput], None] | None = None
) -> list[list[Part]]:
    """Run the requests until all have finished. Returns the parts of each step. watch: called after each step, before
    the next one.
    """
    core = llm.core
    waiting = sorted(arrivals, key=lambda arrival: arrival.step)
    steps = list[list[Part]]()
    scheduler = core.scheduler
    schedule = scheduler.schedule
    last = list[Any]()

    def remember() -> SchedulerOutput:
        step = schedule()
        names = {request.row: request for request in scheduler.running}
        last[:] = [step, [(names[row], names[row].num_computed_tokens) for row in step.rows]]
        return step

    scheduler.schedule = remember  # type: ignore[method-assign]
    number = 0
    while waiting or core.has_unfinished:
        while waiting and waiting[0].step <= number:
            arrival = waiting.pop(0)
            request = llm.processor.process(
                arrival.name, arrival.prompt, arrival.sampling, arrival.priority, adapter=arrival.adapter
            )
            core.add_request(request.core_requests[0])
        last.clear()
        outputs = {output.request_id: len(output.new_token_ids) for output in core.step()} if core.has_work else {}
        number += 1
        if not last or not last[0].rows:
            continue
        step, requests = last
        drafts = step.num_draft_tokens or [0] * len(step.rows)
        parts = [
            Part(
                request.request_id,
                end - count,
                count,
                request.num_prompt_tokens,
                drafted,
                outputs.get(request.request_id, 0),
            )
            for (request, end), count, drafted in zip(requests, step.num_tokens, drafts, strict=True)
        ]
        steps.append(parts)
        if watch is not None:
            watch(parts, step)
    del scheduler.schedule  # type: ignore[method-assign]
    return steps
