"""The scheduler step by step: what a reader of the design documents expects, in small examples."""

from __future__ import annotations

import random
from collections import deque
from itertools import pairwise
from time import process_time

import pytest

from quire.kv.specs import attention_spec
from quire.messages.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import Logprobs, ModelRunnerOutput, SchedulerOutput
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.request import Status
from quire.scheduler.scheduler import Scheduler

EOS = 0


def make_scheduler(
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    budget: int = 64,
    max_model_len: int = 64,
    block_size: int = 4,
    depth: int = 1,
    policy: str = "fcfs",
    window: int | None = None,
    caching: bool = True,
    threshold: int = 0,
) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs, budget, max_model_len, policy, depth, threshold)
    return Scheduler(limits, num_blocks, [attention_spec([0], window)], block_size, caching)


def make_request(
    name: str,
    prompt: list[int],
    max_tokens: int = 8,
    min_tokens: int = 0,
    priority: int = 0,
    arrival: float = 0.0,
    stop: list[int] | None = None,
    eos: int | None = EOS,
) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    return EngineCoreRequest(name, prompt, params, 0, max_tokens, eos, stop or [], arrival, priority)


class Rows:
    """The arithmetic of a worker: block tables from the edits, and the flat batch from the rows."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.tables: dict[tuple[int, int], int] = {}

    def flatten(self, step: SchedulerOutput) -> dict[str, list[int]]:
        for new in step.new_requests:
            self.tokens[new.row], self.computed[new.row] = list(new.token_ids), new.num_computed_tokens
        edits = step.block_table_edits
        for row, index, block in zip(edits.rows, edits.indices, edits.block_ids, strict=True):
            self.tables[row, index] = block
        batch: dict[str, list[int]] = {
            "input_ids": [],
            "positions": [],
            "slot_mapping": [],
            "query_start_loc": [0],
            "seq_lens": [],
        }
        for row, count in zip(step.rows, step.num_tokens, strict=True):
            start, end = self.computed[row], self.computed[row] + count
            for position in range(start, end):
                block = self.tables[row, position // self.block_size]
                batch["slot_mapping"].append(block * self.block_size + position % self.block_size)
            batch["input_ids"] += self.tokens[row][start:end]
            batch["positions"] += range(start, end)
            batch["query_start_loc"].append(batch["query_start_loc"][-1] + count)
            batch["seq_lens"].append(end)
            self.computed[row] = end
        return batch

    def append(self, row: int, token: int) -> None:
        self.tokens[row].append(token)


def answer(scheduler: Scheduler, step: SchedulerOutput, *tokens: int | None) -> list[EngineCoreOutput]:
    """Retire the step: one token a row, None where the row does not sample."""
    return scheduler.update(ModelRunnerOutput(step.step_id, [[] if token is None else [token] for token in tokens]))


def counts(scheduler: Scheduler, step: SchedulerOutput) -> dict[str, int]:
    """Which running request computes how many tokens."""
    names = {request.row: request.request_id for request in scheduler.running}
    return {names[row]: count for row, count in zip(step.rows, step.num_tokens, strict=True)}


# ---- the seeds' worked example


def test_the_worked_example_of_three_prompts_and_blocks_of_four() -> None:
    scheduler = make_scheduler(block_size=4)
    prompts = [[1, 2, 3, 4, 5], [1, 6, 5, 7, 8, 9, 10], [1, 12, 13]]
    for number, prompt in enumerate(prompts):
        scheduler.add(make_request(f"sequence {number + 1}", prompt))
    rows = Rows(block_size=4)

    prefill = scheduler.schedule()
    assert rows.flatten(prefill) == {
        "input_ids": [1, 2, 3, 4, 5, 1, 6, 5, 7, 8, 9, 10, 1, 12, 13],
        "positions": [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2],
        "slot_mapping": [4, 5, 6, 7, 8, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22],
        "query_start_loc": [0, 5, 12, 15],
        "seq_lens": [5, 7, 3],
    }
    answer(scheduler, prefill, 14, 15, 16)
    for row, token in zip(prefill.rows, [14, 15, 16], strict=True):
        rows.append(row, token)

    decode = scheduler.schedule()
    assert decode.new_requests == []
    assert rows.flatten(decode) == {
        "input_ids": [14, 15, 16],
        "positions": [5, 7, 3],
        "slot_mapping": [9, 19, 23],
        "query_start_loc": [0, 1, 2, 3],
        "seq_lens": [6, 8, 4],
    }
    assert decode.block_table_edits.block_ids == []


# ---- one rule: computed tokens catch up with known ones


def test_a_long_prompt_is_computed_in_chunks_between_the_decodes_of_others() -> None:
    scheduler = make_scheduler(budget=10)
    scheduler.add(make_request("short", [1, 2, 3]))
    assert answer(scheduler, scheduler.schedule(), 9)[0].new_token_ids == [9]
    scheduler.add(make_request("long", list(range(10, 35))))
    for expected, tokens in [(9, (9, None)), (9, (9, None)), (7, (9, 5)), (1, (9, 5))]:
        step = scheduler.schedule()
        assert counts(scheduler, step) == {"short": 1, "long": expected}
        answer(scheduler, step, *tokens)


def test_a_threshold_leaves_the_rest_of_a_step_to_other_prompts() -> None:
    scheduler = make_scheduler(budget=20, threshold=8)
    scheduler.add(make_request("long", list(range(10, 35))))
    scheduler.add(make_request("other", [7] * 10))
    scheduler.add(make_request("third", [8] * 10))
    for expected in [{"long": 8, "other": 8, "third": 4}, {"long": 8, "other": 2, "third": 6}, {"long": 8}]:
        step = scheduler.schedule()
        assert expected.items() <= counts(scheduler, step).items()
        samples = {"other": 5, "third": 5} if step.step_id > 1 else {}
        names = {request.row: request.request_id for request in scheduler.running}
        answer(scheduler, step, *(samples.get(names[row]) for row in step.rows))
    assert counts(scheduler, scheduler.schedule()) == {"long": 1, "other": 1, "third": 1}


def test_a_long_prompt_never_takes_the_last_token_of_those_behind_it() -> None:
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_request("first", [1] * 3))
    scheduler.add(make_request("long", list(range(10, 40))))
    scheduler.add(make_request("never waits", [2] * 2))
    step = scheduler.schedule()
    assert counts(scheduler, step) == {"first": 3, "long": 5}
    answer(scheduler, step, 9, None)
    scheduler.abort("first")
    step = scheduler.schedule()
    assert counts(scheduler, step) == {"long": 8}
    scheduler = make_scheduler(budget=8, policy="priority")
    scheduler.add(make_request("behind", [2] * 2, priority=1))
    answer(scheduler, scheduler.schedule(), 9)
    scheduler.add(make_request("long", list(range(10, 40)), priority=0))
    answer(scheduler, scheduler.schedule(), 9, None)
    assert counts(scheduler, scheduler.schedule()) == {"long": 7, "behind": 1}


def test_a_second_step_in_flight_goes_on_from_the_unknown_token() -> None:
    scheduler = make_scheduler(depth=2)
    scheduler.add(make_request("a", [1, 2, 3, 4, 5]))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert (first.num_tokens, second.num_tokens) == ([5], [1])
    assert second.new_requests == []
    assert answer(scheduler, first, 7)[0].new_token_ids == [7]
    assert answer(scheduler, second, 8)[0].new_token_ids == [8]
    assert scheduler.requests["a"].token_ids == [1, 2, 3, 4, 5, 7, 8]


def test_no_step_is_wasted_on_a_request_whose_last_token_is_in_flight() -> None:
    scheduler = make_scheduler(depth=2)
    scheduler.add(make_request("a", [1, 2, 3], max_tokens=2))
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert (first.num_tokens, second.num_tokens, third.num_tokens) == ([3], [1], [])
    answer(scheduler, first, 7)
    (output,) = answer(scheduler, second, 8)
    assert output.finish_reason is FinishReason.LENGTH
    assert not scheduler.has_unfinished


def test_the_token_that_was_computed_past_a_stop_is_dropped() -> None:
    scheduler = make_scheduler(depth=2)
    scheduler.add(make_request("a", [1, 2, 3]))
    first, second = scheduler.schedule(), scheduler.schedule()
    (output,) = answer(scheduler, first, EOS)
    assert output.finish_reason is FinishReason.STOP
    assert scheduler.kv.pool.num_free < scheduler.kv.pool.num_usable  # the second step still writes to its block
    assert scheduler.has_unfinished
    assert answer(scheduler, second, 9) == []
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    assert not scheduler.has_unfinished


# ---- the prefix cache


def test_only_the_last_token_of_a_prompt_is_computed_when_the_rest_is_cached() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("first", list(range(1, 10))))
    answer(scheduler, scheduler.schedule(), 50)
    scheduler.add(make_request("second", list(range(1, 10))))
    step = scheduler.schedule()
    assert counts(scheduler, step) == {"first": 1, "second": 1}
    assert step.new_requests[0].num_computed_tokens == 8
    first, second = answer(scheduler, step, 51, 50)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8)
    assert (scheduler.stats.prefix_queries, scheduler.stats.prefix_hits) == (18, 8)


def test_requests_of_the_same_step_share_their_prefix_already() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("first", list(range(1, 11))))
    scheduler.add(make_request("second", [*range(1, 9), 70]))
    step = scheduler.schedule()
    assert counts(scheduler, step) == {"first": 10, "second": 1}
    table = step.block_table_edits.block_ids
    assert table[:2] == table[3:5]


def test_what_a_finished_request_said_is_found_by_its_continuation() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("turn 1", [1, 2, 3], max_tokens=6))
    for token in range(10, 16):
        answer(scheduler, scheduler.schedule(), token)
    scheduler.add(make_request("turn 2", [1, 2, 3, *range(10, 16), 20, 21]))
    assert scheduler.schedule().new_requests[0].num_computed_tokens == 8


def refuse(scheduler: Scheduler, step: SchedulerOutput, **reasons: str) -> list[EngineCoreOutput]:
    """Retire a step that the worker skipped, because of the requests that are named."""
    names = {request.row: request.request_id for request in scheduler.running}
    refusals = {place: reasons[names[row]] for place, row in enumerate(step.rows) if names.get(row) in reasons}
    return scheduler.update(ModelRunnerOutput(step.step_id, refusals=refusals, was_skipped=True))


def test_a_refused_request_fails_and_its_step_leaves_nothing_to_find() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", list(range(1, 11))))
    scheduler.add(make_request("bad", [*range(1, 9), 70]))
    (output,) = refuse(scheduler, scheduler.schedule(), bad="no such adapter")
    assert (output.request_id, output.finish_reason) == ("bad", FinishReason.ERROR)
    assert output.stop_reason == "no such adapter"
    step = scheduler.schedule()
    assert counts(scheduler, step) == {"a": 10}
    assert (step.epoch, step.new_requests[0].num_computed_tokens) == (1, 0)


def test_all_steps_after_a_skipped_one_are_withdrawn_and_begin_again() -> None:
    scheduler = make_scheduler(depth=3)
    scheduler.add(make_request("runs", [1, 2, 3]))
    answer(scheduler, scheduler.schedule(), 4)
    scheduler.add(make_request("bad", list(range(11, 20))))
    first = scheduler.schedule()
    scheduler.add(make_request("same beginning", list(range(11, 25))))
    second = scheduler.schedule()
    assert second.new_requests[0].num_computed_tokens == 8  # what the first step is to compute
    scheduler.schedule()
    outputs = refuse(scheduler, first, bad="no such adapter")
    assert [output.request_id for output in outputs] == ["bad"]
    assert scheduler.running == []
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    step = scheduler.schedule()
    assert counts(scheduler, step) == {"runs": 4, "same beginning": 14}
    assert (first.epoch, second.epoch, step.epoch) == (0, 0, 1)
    outputs = answer(scheduler, step, 5, 25)
    assert [(output.new_token_ids, output.num_cached_tokens) for output in outputs] == [([5], 0), ([25], 0)]


def test_a_refused_request_that_was_aborted_meanwhile_says_nothing() -> None:
    scheduler = make_scheduler(depth=2)
    scheduler.add(make_request("bad", [1, 2, 3]))
    step = scheduler.schedule()
    assert scheduler.abort("bad")
    scheduler.add(make_request("bad", [4, 5]))  # another one of that name
    scheduler.schedule()
    assert scheduler.update(ModelRunnerOutput(step.step_id, refusals={0: "no"}, was_skipped=True)) == []
    assert counts(scheduler, scheduler.schedule()) == {"bad": 2}


def test_a_skipped_step_without_refusals_is_repeated() -> None:
    """The answer that told of a refusal may have been lost, when Ctrl-C came."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3]))
    assert refuse(scheduler, scheduler.schedule()) == []
    step = scheduler.schedule()
    assert (step.epoch, counts(scheduler, step)) == (1, {"a": 3})


def test_withdrawing_the_second_step_in_flight_keeps_the_first() -> None:
    scheduler = make_scheduler(depth=2)
    scheduler.add(make_request("a", list(range(1, 10))))
    first = scheduler.schedule()
    scheduler.withdraw(scheduler.schedule())
    assert scheduler.requests["a"].status is Status.PREEMPTED
    assert scheduler.schedule().rows == []  # its row and its blocks are still in use
    assert answer(scheduler, first, 50)[0].new_token_ids == [50]
    step = scheduler.schedule()
    assert step.new_requests[0].token_ids == [*range(1, 10), 50]
    assert step.new_requests[0].num_computed_tokens == 8


# ---- preemption


@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_request_resumes_with_the_same_tokens(caching: bool) -> None:
    scheduler = make_scheduler(num_blocks=1 + 4, max_model_len=16, caching=caching)
    scheduler.add(make_request("first", [1, 2, 3, 4, 5, 6, 7]))
    scheduler.add(make_request("last", [11, 12, 13, 14, 15, 16, 17]))
    answer(scheduler, scheduler.schedule(), 8, 18)
    answer(scheduler, scheduler.schedule(), 9, 19)
    step = scheduler.schedule()  # both need a third block, and none is free
    assert counts(scheduler, step) == {"first": 1}
    assert scheduler.requests["last"].status is Status.WAITING
    assert scheduler.stats.preemptions == 1
    answer(scheduler, step, EOS)
    step = scheduler.schedule()
    (new,) = step.new_requests
    assert (new.request_id, new.num_prompt_tokens) == ("last", 7)
    assert new.token_ids == [11, 12, 13, 14, 15, 16, 17, 18, 19]
    assert new.num_computed_tokens == (4 if caching else 0)  # its second block went to the first request
    assert answer(scheduler, step, 20)[0].new_token_ids == [20]


def test_a_preempted_request_keeps_its_blocks_until_its_steps_retire() -> None:
    scheduler = make_scheduler(num_blocks=1 + 4, max_model_len=16, depth=2)
    scheduler.add(make_request("first", [1, 2, 3, 4, 5, 6, 7]))
    scheduler.add(make_request("last", [11, 12, 13, 14, 15, 16, 17]))
    one, two = scheduler.schedule(), scheduler.schedule()
    answer(scheduler, one, 8, 18)
    three = scheduler.schedule()  # no block is free, and those of `last` are in use by step two
    assert three.rows == []
    assert scheduler.requests["last"].status is Status.PREEMPTED
    assert scheduler.kv.pool.num_free == 0
    outputs = answer(scheduler, two, 9, 19)
    assert [output.new_token_ids for output in outputs] == [[9], [19]]
    assert [request.request_id for request in scheduler.waiting] == ["last"]
    assert counts(scheduler, scheduler.schedule()) == {"first": 1}


def test_a_preempted_request_comes_back_before_later_ones() -> None:
    scheduler = make_scheduler(num_blocks=1 + 4, max_model_len=16)
    for number in range(3):
        prompt = [10 * number + i for i in range(1, 8)]
        scheduler.add(make_request(f"r{number}", prompt, max_tokens=6, arrival=float(number)))
    answer(scheduler, scheduler.schedule(), 8, 18)
    answer(scheduler, scheduler.schedule(), 9, 19)
    answer(scheduler, scheduler.schedule(), EOS)
    assert [new.request_id for new in scheduler.schedule().new_requests] == ["r1"]


# ---- the order of service


def test_first_come_first_served_whatever_the_priority_says() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("second", [1], priority=-5, arrival=2.0))
    scheduler.add(make_request("first", [2], priority=5, arrival=1.0))
    assert [new.request_id for new in scheduler.schedule().new_requests] == ["first"]


def test_a_higher_priority_enters_first() -> None:
    scheduler = make_scheduler(max_num_seqs=2, policy="priority")
    for name, priority in [("low", 2), ("high", 0), ("middle", 1)]:
        scheduler.add(make_request(name, [1, 2], priority=priority))
    assert [new.request_id for new in scheduler.schedule().new_requests] == ["high", "middle"]
    assert [request.request_id for request in scheduler.waiting] == ["low"]


def test_the_lowest_priority_is_preempted() -> None:
    scheduler = make_scheduler(num_blocks=1 + 4, max_model_len=16, policy="priority")
    scheduler.add(make_request("low", [1, 2, 3, 4, 5, 6, 7], priority=1))
    scheduler.add(make_request("high", [11, 12, 13, 14, 15, 16, 17, 18], priority=0))
    answer(scheduler, scheduler.schedule(), 8, 18)
    assert counts(scheduler, scheduler.schedule()) == {"high": 1}


def test_a_request_that_finishes_with_a_step_in_flight_holds_up_nobody() -> None:
    scheduler = make_scheduler(depth=2)
    scheduler.add(make_request("a", [1, 2]))
    first = scheduler.schedule()
    scheduler.schedule()
    answer(scheduler, first, EOS)
    scheduler.add(make_request("b", [3, 4]))
    assert counts(scheduler, scheduler.schedule()) == {"b": 2}


def test_requests_do_not_enter_while_a_running_one_waits_for_blocks() -> None:
    scheduler = make_scheduler(num_blocks=1 + 4, max_model_len=16, depth=2)
    scheduler.add(make_request("first", [1, 2, 3, 4, 5, 6, 7]))
    scheduler.add(make_request("leaves", [11, 12, 13, 14]))
    one, two = scheduler.schedule(), scheduler.schedule()
    answer(scheduler, one, 8, EOS)
    assert scheduler.kv.pool.num_free == 0
    scheduler.add(make_request("new", [21]))
    assert scheduler.schedule().rows == []
    answer(scheduler, two, 9, 0)
    assert counts(scheduler, scheduler.schedule()) == {"first": 1, "new": 1}
    assert scheduler.stats.preemptions == 0


# ---- the end


@pytest.mark.parametrize(
    ("token", "reason", "stop_reason"), [(EOS, FinishReason.STOP, None), (77, FinishReason.STOP, 77), (5, None, None)]
)
def test_the_finish_reason_names_the_stop_token(
    token: int, reason: FinishReason | None, stop_reason: int | None
) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], stop=[77]))
    (output,) = answer(scheduler, scheduler.schedule(), token)
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([token], reason, stop_reason)


def test_end_of_sequence_can_be_ignored() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], max_tokens=2, eos=None))
    assert answer(scheduler, scheduler.schedule(), EOS)[0].finish_reason is None
    assert answer(scheduler, scheduler.schedule(), EOS)[0].finish_reason is FinishReason.LENGTH


def test_max_tokens_ends_a_request() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], max_tokens=3))
    reasons = [answer(scheduler, scheduler.schedule(), 5)[0].finish_reason for _ in range(3)]
    assert reasons == [None, None, FinishReason.LENGTH]
    assert not scheduler.has_unfinished


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], max_tokens=1))
    assert answer(scheduler, scheduler.schedule(), EOS)[0].finish_reason is FinishReason.STOP


def test_nothing_stops_a_request_before_min_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2], min_tokens=2, stop=[77]))
    step = scheduler.schedule()
    assert step.new_requests[0].stop_token_ids == [EOS, 77]  # the sampler holds these down
    reasons = [answer(scheduler, step, EOS)[0].finish_reason]
    reasons += [answer(scheduler, scheduler.schedule(), token)[0].finish_reason for token in (77, EOS)]
    assert reasons == [None, None, FinishReason.STOP]


def test_of_several_tokens_only_those_up_to_the_stop_count() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2]))
    step = scheduler.schedule()
    (output,) = scheduler.update(ModelRunnerOutput(step.step_id, [[5, EOS, 6]]))
    assert (output.new_token_ids, output.finish_reason) == ([5, EOS], FinishReason.STOP)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_request_says_no_more_and_leaves_no_block(depth: int) -> None:
    scheduler = make_scheduler(depth=depth)
    scheduler.add(make_request("a", [1, 2, 3, 4, 5]))
    scheduler.add(make_request("waits", [1, 2]))
    assert scheduler.abort("waits")
    assert len(scheduler.waiting) == 1
    steps = [scheduler.schedule() for _ in range(depth)]
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    assert scheduler.kv.pool.num_free < scheduler.kv.pool.num_usable
    for step in steps:
        assert answer(scheduler, step, 9) == []
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    assert not scheduler.has_unfinished


# ---- errors name the numbers


def test_limits_that_starve_running_requests_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(4\) must be at least max_num_seqs \(8\)"):
        make_scheduler(budget=4, max_num_seqs=8)


def test_a_cache_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_model_len=64 tokens needs 16 KV blocks, but there are 15"):
        make_scheduler(num_blocks=16)
    make_scheduler(num_blocks=17)


def test_a_window_makes_a_small_cache_enough() -> None:
    make_scheduler(num_blocks=1 + 5, window=8, budget=8)  # 15 tokens, which may begin anywhere in a block


def test_a_request_that_cannot_fit_is_refused() -> None:
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match=r"long: a prompt of 60 tokens and max_tokens=8 do not fit max_model_len=64"):
        scheduler.add(make_request("long", [1] * 60))
    with pytest.raises(ValueError, match="a prompt of 0 tokens"):
        scheduler.add(make_request("empty", []))
    assert not scheduler.has_unfinished


def test_a_request_id_can_be_used_once_at_a_time() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    with pytest.raises(ValueError, match="'a' is in use"):
        scheduler.add(make_request("a", [1]))
    scheduler.abort("a")
    scheduler.add(make_request("a", [1]))


def test_results_of_another_step_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    step = scheduler.schedule()
    with pytest.raises(ValueError, match=f"results of step {step.step_id}, got those of step 9"):
        scheduler.update(ModelRunnerOutput(9, [[5]]))


# ---- logprobs


def test_logprobs_reach_the_request_of_their_place() -> None:
    scheduler = make_scheduler(depth=2)
    for name in "abcd":
        scheduler.add(make_request(name, [1, 2, 3]))
    step = scheduler.schedule()
    scheduler.abort("b")  # its place in the step stays
    made = {place: Logprobs(1, bytes(4 * place), b"", b"") for place in (1, 2, 3)}
    output = ModelRunnerOutput(step.step_id, [[5], [6], [7], [8]], made, {3: made[3]})
    outputs = scheduler.update(output)
    assert [(o.request_id, o.logprobs, o.prompt_logprobs) for o in outputs] == [
        ("a", None, None),
        ("c", made[2], None),
        ("d", made[3], made[3]),
    ]


def test_a_request_with_prompt_logprobs_reads_the_cache_only_after_its_first_output() -> None:
    scheduler = make_scheduler(num_blocks=6, budget=16, max_model_len=20)
    scheduler.add(make_request("earlier", list(range(1, 10)), max_tokens=1))
    answer(scheduler, scheduler.schedule(), 50)
    asking = make_request("asking", list(range(1, 10)), max_tokens=9)
    asking.sampling_params = SamplingParams(prompt_logprobs=1)
    scheduler.add(asking)
    step = scheduler.schedule()
    assert (step.num_tokens, step.new_requests[0].num_computed_tokens) == ([9], 0)
    scheduler.withdraw(step)  # before its first output
    step = scheduler.schedule()
    assert (step.num_tokens, step.new_requests[0].num_computed_tokens) == ([9], 0)
    answer(scheduler, step, 51)
    scheduler.withdraw(scheduler.schedule())
    step = scheduler.schedule()
    assert (step.num_tokens, step.new_requests[0].num_computed_tokens) == ([2], 8)
    assert scheduler.stats.prefix_queries == 9  # that of the first admission; a preempted request finds its own blocks


# ---- traffic


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_an_hour_of_traffic_is_simulated_in_seconds_and_nothing_is_lost(depth: int) -> None:
    """A request a second; a step takes 20 ms and 1 ms for every 16 tokens."""
    dice = random.Random(0)
    arrivals = deque(
        make_request(
            f"r{second}",
            [dice.randrange(10, 1000) for _ in range(dice.randint(32, 2048))],
            max_tokens=dice.randint(16, 512),
            arrival=float(second),
        )
        for second in range(3600)
    )
    wanted = {source.request_id: source.max_tokens for source in arrivals}
    scheduler = make_scheduler(1500, max_num_seqs=64, budget=512, max_model_len=2560, block_size=16, depth=depth)
    missing: dict[int, int] = {}  # row -> tokens not computed
    in_flight: deque[ModelRunnerOutput] = deque()
    clock, said = 0.0, dict.fromkeys(wanted, 0)
    num_steps, quarters = 0, [(process_time(), 0)]  # the processor time and the steps up to each quarter of an hour
    while arrivals or scheduler.has_unfinished:
        if len(arrivals) <= 3600 - 900 * len(quarters):
            quarters.append((process_time(), num_steps))
        num_steps += 1
        while arrivals and arrivals[0].arrival_time <= clock:
            scheduler.add(arrivals.popleft())
        step = scheduler.schedule()
        if step.rows:
            missing |= {new.row: len(new.token_ids) - new.num_computed_tokens for new in step.new_requests}
            output = ModelRunnerOutput(step.step_id)
            for row, count in zip(step.rows, step.num_tokens, strict=True):
                missing[row] -= count
                output.sampled_token_ids.append([] if missing[row] else [7])
                missing[row] = missing[row] or 1
            in_flight.append(output)
            clock += 0.020 + 0.001 / 16 * sum(step.num_tokens)
        elif not in_flight:
            clock = arrivals[0].arrival_time
            continue
        if len(in_flight) == depth or not step.rows:
            for result in scheduler.update(in_flight.popleft()):
                said[result.request_id] += len(result.new_token_ids)
    assert said == wanted
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
    assert clock < 3700  # it kept up with the traffic
    costs = [(later[0] - sooner[0]) / (later[1] - sooner[1]) for sooner, later in pairwise(quarters)]
    assert len(costs) == 4
    assert costs[-1] < 4 * costs[0], "a step takes longer and longer"
