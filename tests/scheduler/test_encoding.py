"""The encoder cache and the encoder budget, against a model of a worker that keeps embeddings by key.

Requests with pictures come, are aborted, preempted and refused. At every step, each picture that a chunk touches must
be in the worker's cache, no step encodes more than its budget, the cache never holds more than its capacity, and in the
end all requests are done. Only texts pass a request that waits for its picture, and they leave it what it needs.
"""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.kv.specs import attention_spec
from quire.messages.engine import EngineCoreRequest
from quire.messages.media import EncoderLimits, MediaItem, MediaPlace
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import ModelRunnerOutput, SchedulerOutput
from quire.scheduler.encoding import EncoderCache
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.request import Status
from quire.scheduler.scheduler import Scheduler

SIZES = {"a": 3, "b": 5, "c": 5, "d": 8, "e": 2}  # embeddings by the key of a picture
PICTURE, MAX_MODEL_LEN = 99, 48


def request(
    number: int,
    parts: list[str | int],
    whole: bool = False,
    max_tokens: int = 3,
    opening: int = 1,
    priority: int = 0,
    salt: str | None = None,
) -> EngineCoreRequest:
    """parts: keys of pictures, and numbers of text tokens between them. opening: text tokens before them."""
    tokens: list[int] = [7] * opening
    media = []
    for part in parts:
        if isinstance(part, int):
            tokens += [10 + i % 3 for i in range(part)]
            continue
        size = SIZES[part]
        media.append(MediaItem(MediaPlace(part, len(tokens), size + 1, [(1, size)], whole), "image", {}))
        tokens += [PICTURE] * (size + 1)  # the first of them is text
    params = SamplingParams(temperature=0)
    return EngineCoreRequest(
        str(number), tokens, params, 0, max_tokens, media=media, priority=priority, cache_salt=salt
    )


class Worker:
    """Executes steps: rows with their pictures, and the keys of the embeddings that it keeps."""

    def __init__(self, limits: EncoderLimits) -> None:
        self.limits, self.kept, self.rows = limits, dict[str, int](), dict[int, list]()
        self.encoded, self.skipped_epoch = 0, -1

    def execute(self, step: SchedulerOutput) -> list[list[int]]:
        if step.forgets_all:
            self.kept.clear()
        for key in step.forget:
            del self.kept[key]
        sizes = []
        for item in step.encode:
            assert item.place.key not in self.kept, "it was there"
            sizes.append(item.place.num_embeds)
            self.kept[item.place.key] = item.place.num_embeds
        assert sum(sizes) <= self.limits.budget or len(sizes) == 1
        assert sum(self.kept.values()) <= self.limits.capacity
        self.encoded += len(sizes)
        for new in step.new_requests:
            self.rows[new.row] = [new.num_computed_tokens, len(new.token_ids), new.media]
        sampled = []
        for row, count in zip(step.rows, step.num_tokens, strict=True):
            start, known, places = self.rows[row]
            end = start + count
            for place in places:
                if place.start < end and place.end > start:
                    assert place.key in self.kept, f"step {step.step_id} lacks {place.key}"
                    assert not place.whole or place.end <= end, "a whole picture was cut"
            self.rows[row][0] = end
            sampled.append([50] if end == known else [])
            self.rows[row][1] += end == known
        return sampled


def make(
    limits: EncoderLimits, blocks: int = 200, tokens: int = 12, depth: int = 1, policy: str = "fcfs", rows: int = 4
) -> Scheduler:
    return Scheduler(
        SchedulerLimits(rows, tokens, MAX_MODEL_LEN, policy, depth),
        blocks,
        [attention_spec([0], None)],
        4,
        encoders=EncoderCache(limits),
    )


def schedule(scheduler: Scheduler) -> SchedulerOutput:
    """The next step. Checks who was admitted before whom."""
    waiting = sorted(scheduler.waiting, key=lambda request: request.key)
    step = scheduler.schedule()
    passed = []
    for request in waiting:
        if request.status is Status.WAITING:
            passed.append(request)
        elif request.status is Status.RUNNING and passed:
            assert all(other.source.media for other in passed), "texts are admitted in the order of service"
            assert not request.source.media, "it may need what they wait for"
            assert request.num_computed_tokens == len(request.token_ids), "it takes tokens of the next step"
            assert len(scheduler._free_rows) >= len(passed), "it has taken their row"
            assert scheduler.kv.pool.num_free >= sum(map(scheduler.kv.needed_blocks, passed)), "or their blocks"
    return step


def run(scheduler: Scheduler, worker: Worker, dice: random.Random | None = None) -> set[str]:
    """Run until nothing is left. dice: for aborts and refusals. Returns the ids of finished requests."""
    flights: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    finished, idle = set(), 0
    while scheduler.has_unfinished:
        while len(flights) < scheduler.limits.depth:
            step = schedule(scheduler)
            if not step.rows:
                break
            if step.epoch <= worker.skipped_epoch:
                output = ModelRunnerOutput(step.step_id, was_skipped=True)
            elif dice is not None and dice.random() < 0.05:
                worker.skipped_epoch = step.epoch
                output = ModelRunnerOutput(step.step_id, refusals={0: "no memory"}, was_skipped=True)
            else:
                output = ModelRunnerOutput(step.step_id, worker.execute(step))
            flights.append((step, output))
        idle = 0 if flights else idle + 1
        assert idle < 3, "nothing can be run"
        if flights:
            step, output = flights.popleft()
            if step.epoch == scheduler.epoch:
                outputs = scheduler.update(output)
                finished |= {o.request_id for o in outputs if o.finish_reason is not None}
        if dice is not None and dice.random() < 0.05 and scheduler.requests:
            scheduler.abort(dice.choice(list(scheduler.requests)))
    return finished


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.lists(st.sampled_from([*SIZES, 1, 4]), min_size=1, max_size=4), min_size=1, max_size=8),
    st.integers(8, 20),
    st.integers(1, 12),
    st.booleans(),
    st.integers(1, 2),
    st.sampled_from([13, 16, 200]),
    st.sampled_from(["fcfs", "priority"]),
    st.integers(0, 1000),
)
def test_every_chunk_finds_its_pictures_within_budget_and_room(
    requests, capacity, budget, whole, depth, blocks, policy, seed
):
    limits = EncoderLimits(budget, capacity, longest_chunk=12)
    scheduler, worker = make(limits, blocks, depth=depth, policy=policy), Worker(limits)
    dice = random.Random(seed)
    added = [
        request(number, parts, whole, opening=dice.choice([0, 1]), priority=dice.randint(0, 2))
        for number, parts in enumerate(requests)
    ]
    for source in added:
        scheduler.add(source)
    run(scheduler, worker, random.Random(seed) if seed else None)
    assert not scheduler.requests
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    assert all(not holders for holders in scheduler.encoders._holders.values())


def test_requests_share_what_was_encoded():
    limits = EncoderLimits(20, 20, 12)
    scheduler, worker = make(limits), Worker(limits)
    for number in range(3):
        scheduler.add(request(number, [number + 1, "a", "b"]))
    assert run(scheduler, worker) == {"0", "1", "2"}
    assert worker.encoded == 2
    scheduler.add(request(3, [5, "b"]))
    run(scheduler, worker)
    assert worker.encoded == 2


def test_a_chunk_ends_before_a_picture_that_the_budget_lacks_and_decoding_goes_on():
    limits = EncoderLimits(8, 30, 40)
    scheduler, worker = make(limits, tokens=40), Worker(limits)
    scheduler.add(request(0, [2], max_tokens=20))
    worker.execute(step := scheduler.schedule())
    scheduler.update(ModelRunnerOutput(step.step_id, [[50]]))
    scheduler.add(request(1, ["b", "d", "a"]))
    steps = []
    for _ in range(3):
        step = scheduler.schedule()
        steps.append(([item.place.key for item in step.encode], step.num_tokens))
        scheduler.update(ModelRunnerOutput(step.step_id, worker.execute(step)))
    assert steps == [(["b"], [1, 7]), (["d"], [1, 9]), (["a"], [1, 4])]


def test_blocks_are_shared_up_to_the_first_different_picture():
    limits = EncoderLimits(20, 20, 20)
    scheduler, worker = make(limits, tokens=20), Worker(limits)
    cached = {}
    for number, parts in enumerate([[4, "b", 8], [4, "b", 8], [4, "c", 8]]):
        scheduler.add(request(number, parts))
        step = scheduler.schedule()
        cached[number] = step.new_requests[0].num_computed_tokens
        scheduler.update(ModelRunnerOutput(step.step_id, worker.execute(step)))
        run(scheduler, worker)
    assert cached == {0: 0, 1: 16, 2: 4}  # of 19 tokens, of which the picture begins at the fifth


def test_items_that_can_never_be_encoded_are_refused():
    big = [request(0, ["d"])]
    for limits, reason in (
        (EncoderLimits(), "encoder_cache_size"),
        (EncoderLimits(4, 20, 20, exact=True), "max_num_encoder_input_tokens"),
    ):
        with pytest.raises(ValueError, match=reason):
            make(limits).add(big[0])
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        make(EncoderLimits(20, 20, 4)).add(request(0, ["d"], whole=True))


def test_a_larger_item_than_the_budget_is_encoded_alone():
    limits = EncoderLimits(4, 20, 40)
    scheduler, worker = make(limits, tokens=40), Worker(limits)
    scheduler.add(request(0, ["d", "a"]))
    assert run(scheduler, worker) == {"0"}


def names(step: SchedulerOutput) -> list[str]:
    return [new.request_id for new in step.new_requests]


def test_texts_pass_a_request_that_waits_for_the_encoder_and_it_goes_first_in_the_next_step():
    limits = EncoderLimits(8, 30, 40)
    scheduler, worker = make(limits, tokens=40, rows=8), Worker(limits)
    for number, parts in enumerate([["d", 3], ["b", 2], [5], ["e"], [1]]):
        scheduler.add(request(number, parts, opening=0))
    step = schedule(scheduler)
    assert (names(step), [item.place.key for item in step.encode]) == (["0", "2", "4"], ["d"])
    assert [waiting.request_id for waiting in sorted(scheduler.waiting, key=lambda each: each.key)] == ["1", "3"]
    scheduler.update(ModelRunnerOutput(step.step_id, worker.execute(step)))
    scheduler.add(request(5, [1]))
    step = schedule(scheduler)
    assert (names(step), [item.place.key for item in step.encode]) == (["1", "3", "5"], ["b", "e"])


def test_a_request_that_waits_for_the_encoder_keeps_a_row_blocks_and_the_tokens_of_the_next_step():
    waits = request(1, ["b"], opening=0)
    for text, rows, blocks, budget in (
        (request(2, [3]), 2, 200, 40),  # needs the last row
        (request(2, [26]), 8, 13, 40),  # needs the last blocks
        (request(2, [30]), 8, 200, 36),  # is longer than the step
        (request(2, ["e"], opening=0), 8, 200, 40),  # may need the encoder
    ):
        limits = EncoderLimits(8, 30, 40)
        scheduler = make(limits, blocks, budget, rows=rows)
        for source in (request(0, ["d", 3]), waits, text):
            scheduler.add(source)
        step = schedule(scheduler)
        assert names(step) == ["0"]
        scheduler.update(ModelRunnerOutput(step.step_id, Worker(limits).execute(step)))
        assert names(schedule(scheduler))[:1] == ["1"]


def test_texts_that_keep_coming_do_not_delay_a_picture():
    limits = EncoderLimits(5, 30, 40)
    scheduler, worker = make(limits, tokens=40, rows=8), Worker(limits)
    scheduler.add(request(0, ["b", 2, "c", 2, "e"]))  # takes the encoder for three steps
    scheduler.add(request(1, ["d"], opening=0))
    number = 2
    admitted: list[str] = []
    while "1" not in admitted:
        scheduler.add(request(number, [2], max_tokens=30))
        number += 1
        step = schedule(scheduler)
        admitted += names(step)
        scheduler.update(ModelRunnerOutput(step.step_id, worker.execute(step)))
    assert admitted == ["0", "2", "3", "4", "1", "5"]


def test_nothing_passes_a_picture_for_which_only_tokens_are_lacking():
    """It would never get them while other requests keep coming."""
    scheduler = make(EncoderLimits(20, 20, 12), tokens=12)
    scheduler.add(request(0, [5]))
    scheduler.add(request(1, ["d"], whole=True, opening=0))
    scheduler.add(request(2, [1]))
    assert names(schedule(scheduler)) == ["0"]
