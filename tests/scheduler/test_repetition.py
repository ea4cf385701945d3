"""Output that repeats itself is found, by a detector that is compared with the plain definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.kv.specs import attention_spec
from quire.messages.engine import EngineCoreRequest, FinishReason
from quire.messages.sampling_params import RepetitionDetectionParams, SamplingParams
from quire.messages.step import ModelRunnerOutput
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.repetition import RepetitionDetector
from quire.scheduler.scheduler import Scheduler


def repeats(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """The definition: the output ends with a pattern, min_count times in a row."""
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        whole = size * params.min_count
        if whole <= len(tokens) and tokens[-whole:] == tokens[-size:] * params.min_count:
            return True
    return False


@given(
    tokens=st.lists(st.integers(0, 2), max_size=40),
    smallest=st.integers(0, 4),
    more=st.integers(0, 6),
    count=st.integers(2, 5),
    known=st.integers(0, 10),
)
def test_a_repetition_is_found_at_the_token_that_completes_it(tokens, smallest, more, count, known):
    params = RepetitionDetectionParams(smallest + more, smallest, count)
    detector = RepetitionDetector(params, tokens[:known])
    for end in range(known, len(tokens)):
        assert detector.append(tokens[end]) == repeats(tokens[: end + 1], params), tokens[: end + 1]


def run(tokens: list[int], known: tuple[int, ...] = (), **fields) -> tuple[list[int], FinishReason | None, object]:
    """What becomes of a request for which the model draws these tokens."""
    limits = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)
    scheduler = Scheduler(limits, num_blocks=32, kv_specs=[attention_spec([0])], block_size=4)
    detection = {"max_pattern_size": 3, "min_count": 3}
    params = SamplingParams(max_tokens=20, repetition_detection=detection, **fields)
    request = EngineCoreRequest("a", [1, 2, 1, 2, 1], params, 0, 20, output_token_ids=list(known))
    scheduler.add(request)
    made: list[int] = []
    for token in tokens:
        step = scheduler.schedule()
        [output] = scheduler.update(ModelRunnerOutput(step.step_id, [[token]]))
        made += output.new_token_ids
        if output.finish_reason is not None:
            assert not scheduler.has_unfinished
            return made, output.finish_reason, output.stop_reason
    return made, None, None


def test_a_request_that_repeats_itself_ends():
    ending = FinishReason.REPETITION, "repetition_detected"
    assert run([7, 5, 6, 5, 6, 5, 6, 5]) == ([7, 5, 6, 5, 6, 5, 6], *ending)
    assert run([1, 2, 1, 2, 1, 2]) == ([1, 2, 1, 2, 1, 2], *ending), "the prompt does not count"
    assert run([7, 8, 9, 7, 8, 9, 7, 8])[1] is None


def test_no_repetition_ends_a_request_before_min_tokens():
    assert run([5] * 8, min_tokens=6)[0] == [5] * 6


def test_what_was_said_to_a_lost_core_counts():
    assert run([6, 5, 6], known=(5, 6, 5)) == ([6, 5, 6], FinishReason.REPETITION, "repetition_detected")
