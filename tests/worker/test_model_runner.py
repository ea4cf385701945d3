"""Steps in which rows are sampled at several places: each place says what the same text, sampled alone, says."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from quire.engine.llm import LLM
from quire.executor.base import Executor
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import (
    BlockTableEdits,
    Logprobs,
    ModelRunnerOutput,
    NewRequest,
    SchedulerOutput,
    TokenEdits,
    TokenMasks,
)
from support.engines import make_llm, runner_of
from support.late_device import run_late

VOCAB, NEAR = 320, 2e-4
WORDS = [5, 6, 7, 8, 9, 10]  # few tokens, so that they and sequences of them come again
GREEDY = SamplingParams(temperature=0, logprobs=4, max_tokens=40)
SEEDED = GREEDY.clone(temperature=0.8, top_p=0.95)
KINDS: list[SamplingParams] = [
    GREEDY,
    SEEDED,
    GREEDY.clone(logprobs=None),
    GREEDY.clone(repetition_penalty=1.7, presence_penalty=0.8),
    SEEDED.clone(frequency_penalty=1.5, logprobs=0),
    GREEDY.clone(min_tokens=4, logit_bias={11: 30.0, 12: 29.0, 13: 5.0}),  # these end it: see `new_request`
    SEEDED.clone(logit_bias={5: 6.0, 6: 6.0, 7: 6.0, 8: 6.0}, top_k=8, min_p=0.01),
    GREEDY.clone(allowed_token_ids=[5, 6, 90, 91, 92], logprobs=2),
    GREEDY.clone(logprobs=None, logprob_token_ids=[9, 300, 5]),
]
BAD_WORDS = [[word, other] for word in WORDS for other in WORDS if (word + other) % 3] + [[9], [5, 6, 7], [8, 5, 10]]


@pytest.fixture(scope="module", params=["raw_logprobs", pytest.param("processed_logprobs", marks=pytest.mark.nightly)])
def llm(request: pytest.FixtureRequest, checkpoints: Any) -> LLM:
    """Its steps report what was sampled at each place, whatever the draft behind it is."""
    llm = make_llm(checkpoints.path("qwen3-mixed-windows-biases"), logprobs_mode=request.param)
    staging = runner_of(llm).staging
    staging.count_kept = staging.kernels.count_kept = lambda *arguments: arguments[-1].diff()
    return llm


def new_request(row: int, tokens: list[int], num_prompt: int, params: SamplingParams) -> NewRequest:
    return NewRequest(
        f"request {row}",
        row,
        tokens,
        num_prompt,
        0,
        params,
        seed=1000 + row % len(KINDS),
        stop_token_ids=[11, 12],
        bad_words=BAD_WORDS if params.logit_bias and params.top_k else [],
    )


class Driver:
    """Gives steps to an executor. Each row has blocks of its own."""

    def __init__(self, llm: LLM, executor: Executor) -> None:
        runner: Any = executor.runner
        self.executor, self.steps = executor, 0
        self.known: dict[int, int] = {}  # tokens by row
        groups, _, blocks = runner.batch.block_tables.shape
        self.blocks = [(group, index) for group in range(groups) for index in range(-(-48 // runner.batch.block_size))]
        assert blocks >= 3

    def run(
        self,
        rows: list[int],
        num_tokens: list[int],
        new: list[NewRequest],
        drafts: list[list[int]] | None = None,
        masks: TokenMasks | None = None,
    ) -> ModelRunnerOutput:
        edits, guesses = BlockTableEdits(), TokenEdits()
        self.known |= {request.row: len(request.token_ids) for request in new}
        for row, tokens in zip(rows, drafts or [], strict=False):
            guesses.rows += [row] * len(tokens)
            guesses.positions += range(self.known[row], self.known[row] + len(tokens))
            guesses.token_ids += tokens
        for request in new:
            for number, (group, index) in enumerate(self.blocks):
                edits.groups.append(group)
                edits.rows.append(request.row)
                edits.indices.append(index)
                edits.block_ids.append(1 + request.row * len(self.blocks) + number)
        self.steps += 1
        step = SchedulerOutput(
            10_000 + self.steps,
            new,
            rows,
            num_tokens,
            edits,
            draft_tokens=guesses,
            num_draft_tokens=[len(tokens) for tokens in drafts or []],
        )
        self.executor.submit(step)
        output = self.executor.sample(step.step_id, masks).result()
        for row, sampled in zip(rows, output.sampled_token_ids, strict=True):
            self.known[row] += len(sampled)
        return output


def executors(llm: LLM) -> list[Executor]:
    """The plain one, and a late device at depth 1."""
    plain = llm.core.executor
    late = run_late(llm, 1)
    late.scheduler.exhausted = True
    llm.core.executor = plain
    return [plain, late]


def columns(logprobs: Logprobs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    token_ids = np.frombuffer(logprobs.token_ids, np.int32).reshape(-1, logprobs.width)
    values = np.frombuffer(logprobs.logprobs, np.float32).reshape(-1, logprobs.width)
    return token_ids, values, np.frombuffer(logprobs.ranks, np.int32)


def check_same(place: int, made: Logprobs, alone: Logprobs) -> None:
    for column, expected in zip(columns(made), columns(alone), strict=True):
        np.testing.assert_allclose(column[place], expected[0], atol=NEAR)


def test_each_place_of_a_row_says_what_its_text_says_alone(llm):
    """In a step with rows of one place, of several, and of none, since more of their prompt is to come."""
    draw = random.Random(11)
    rows = range(len(KINDS))
    prompts = [[draw.choice(WORDS) for _ in range(draw.randint(1, 20))] for _ in rows]
    outputs = [[draw.choice(WORDS) for _ in range(draw.randint(5, 9))] for _ in rows]
    for executor in executors(llm):
        driver = Driver(llm, executor)
        for drafts in ([3] * len(KINDS), [row % 4 for row in rows], [0, 5, 0, 5, 0, 5, 4, 0, 1]):
            known = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
            chunk = new_request(len(KINDS), [draw.choice(WORDS) for _ in range(30)], 30, GREEDY)
            ends = [len(known[row]) - drafts[row] for row in rows]
            new = [new_request(row, known[row][: ends[row]], len(prompts[row]), KINDS[row]) for row in rows]
            # What comes before the places is computed in a step of its own, where there is anything.
            before = [len(known[row]) - drafts[row] - 1 if row % 2 else 0 for row in rows]
            first = [row for row in rows if before[row]]
            driver.run([chunk.row, *first], [4, *(before[row] for row in first)], [chunk, *(new[row] for row in first)])
            step = [*rows[:4], chunk.row, *rows[4:]]
            counts = [5 if row == chunk.row else len(known[row]) - before[row] for row in step]
            late = [request for request in new if request.row not in first]
            guesses = [[] if row == chunk.row else known[row][ends[row] :] for row in step]
            output = driver.run(step, counts, late, guesses)
            assert output.sampled_token_ids[4] == []
            for index, row in enumerate(step):
                if row == chunk.row:
                    continue
                sampled, params = output.sampled_token_ids[index], KINDS[row]
                assert len(sampled) == 1 + drafts[row]
                for place, token in enumerate(sampled):
                    text = known[row][: len(known[row]) - drafts[row] + place]
                    request = new_request(row + len(KINDS) + 1, text, len(prompts[row]), params)
                    request.seed = new[row].seed
                    alone = driver.run([request.row], [len(text)], [request])
                    assert alone.sampled_token_ids == [[token]], (row, place)
                    if params.num_logprobs is None:
                        assert index not in output.logprobs
                    else:
                        check_same(place, output.logprobs[index], alone.logprobs[0])


def test_the_places_are_not_all_alike(llm):
    """Else the test above would show nothing."""
    driver = Driver(llm, llm.core.executor)
    text = [5, 6, 7, 8, 5, 6, 5, 9, 10, 6]
    made = []
    for row, params in enumerate(KINDS):
        output = driver.run([row], [len(text)], [new_request(row, text[:-6], 3, params)], [text[-6:]])
        made.append(output.sampled_token_ids[0])
    assert len({tuple(sampled) for sampled in made}) >= 6
    assert not {11, 12} & set(made[5][:3]), "min_tokens holds them down"
    assert set(made[5][3:]) <= {11, 12}


def test_a_row_with_drafts_goes_on_behind_them(llm):
    """If all drafts are kept, what is sampled behind the last one comes next."""
    text = list(accumulate([7, *([1] * 20)]))
    for executor in executors(llm):
        driver = Driver(llm, executor)
        new = [new_request(0, text[:-3], 9, GREEDY)]
        [drafted] = driver.run([0], [len(text)], new, [text[-3:]]).sampled_token_ids
        [after] = driver.run([0], [1], []).sampled_token_ids
        [plain] = driver.run([1], [len(text)], [new_request(1, text, 9, GREEDY)]).sampled_token_ids
        assert plain == drafted[-1:]
        assert driver.run([1], [1], []).sampled_token_ids == [after]


def test_a_mask_holds_at_its_own_place_of_a_row(llm):
    """Penalties and temperature come after it; the other places are as they were."""
    text, rows = [5, 6, 7, 8, 5, 6, 5, 9, 10, 6], [0, 1, 2]
    for executor in executors(llm):
        driver = Driver(llm, executor)

        def run(driver: Driver = driver, masks: TokenMasks | None = None) -> list[int]:
            ends = [8, 10, 7]
            new = [new_request(row, text[: ends[row]], 3, KINDS[[3, 1, 4][row]]) for row in rows]
            output = driver.run(rows, [len(text)] * 3, new, [text[end:] for end in ends], masks)
            return [token for sampled in output.sampled_token_ids for token in sampled]

        free = run()
        assert len(free) == 3 + 1 + 4
        words = np.zeros((3, VOCAB // 32), np.int32)
        words[:, 2] = 1 << 6  # token 70
        masked = run(masks=TokenMasks([1, 3, 6], memoryview(words.tobytes())))
        assert [masked[place] for place in (1, 3, 6)] == [70, 70, 70]
        assert 70 not in free
        others = [0, 2, 4, 5, 7]
        assert [masked[place] for place in others] == [free[place] for place in others]
