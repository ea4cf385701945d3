"""Two steps in flight say what one step at a time says, on a device that works as late as it can."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from quire.engine.core import EngineCore, EngineDeadError
from quire.engine.llm import LLM
from quire.messages.engine import EngineCoreOutput, EngineCoreRequest
from quire.messages.outputs import RequestOutput
from quire.messages.sampling_params import SamplingParams
from quire.structured.constraint import Constraint
from quire.structured.gate import GrammarGate
from support.checkpoints import Checkpoints
from support.engines import (
    GREEDY,
    assert_nothing_is_left,
    assert_preempted,
    collect,
    core_request,
    finish,
    generate,
    make_llm,
)
from support.late_device import LateExecutor, run_late, watched_scheduler
from support.reference import References

pytestmark = pytest.mark.texts

VARIANTS = ["llama", "qwen3-mixed-windows-biases"]
TIGHT = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 24, "max_num_seqs": 12}

VOCAB = 320

each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_engine = pytest.mark.parametrize(
    ("variant", "options"),
    [
        pytest.param(variant, options, id=f"{variant}-{name}", marks=[pytest.mark.sampled(11)] * (index in (1, 2)))
        for index, (variant, (name, options)) in enumerate(product(VARIANTS, [("roomy", {}), ("tight", TIGHT)]))
    ],
)


def outcomes(outputs: list[RequestOutput]) -> list[tuple[list[int], str, str | None, int | str | None]]:
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for output in outputs for c in output.outputs]


def at_both_depths(
    checkpoints: Checkpoints, variant: str, prompts: list[Any], params: Any, **options: int
) -> list[Any]:
    """The outcomes, which must be the same without a late device, and with one at depth 1 and at depth 2."""
    made = [outcomes(generate(make_llm(checkpoints.path(variant), **options), prompts, params))]
    for depth in (1, 2):
        llm = make_llm(checkpoints.path(variant), **options)
        device = run_late(llm, depth)
        made.append(outcomes(generate(llm, prompts, params)))
        assert device.most_in_flight == depth
    assert made[1] == made[0]
    assert made[2] == made[0]
    return made[0]


class Impatient(EngineCore):
    """Reads each result at once, whatever the scheduler's depth."""

    def step(self) -> list[EngineCoreOutput]:
        step = self.scheduler.schedule()
        self.executor.submit(step)
        return self.scheduler.update(self.executor.sample(step.step_id).result())


def test_the_late_device_finds_out_a_core_that_reads_results_early(checkpoints):
    llm = make_llm(checkpoints.path("llama"))
    scheduler = watched_scheduler(llm, 2)
    llm.core = Impatient(scheduler, LateExecutor(llm, scheduler))
    with pytest.raises(AssertionError, match="read with 1 of 2 steps in flight"):
        llm.generate([5, 6, 7], GREEDY, use_tqdm=False)


@pytest.mark.sampled(4)
@each_engine
def test_stop_tokens_end_the_same(checkpoints: Checkpoints, references: References, variant, options):
    expected = references.continuations(variant)[:12]
    stops = [c.token_ids[5 * i % 60] for i, c in enumerate(expected)]
    params = [GREEDY.clone(stop_token_ids=[stop]) for stop in stops]
    made = at_both_depths(checkpoints, variant, [c.prompt for c in expected], params, **options)
    for continuation, stop, (token_ids, _, reason, stop_reason) in zip(expected, stops, made, strict=True):
        end = continuation.token_ids.index(stop) + 1
        if end <= continuation.certain:
            assert token_ids == continuation.token_ids[:end]
            assert (reason, stop_reason) == ("stop", stop)


@pytest.mark.sampled(4)
@each_engine
def test_stop_strings_end_the_same(checkpoints: Checkpoints, references: References, variant, options):
    llm = make_llm(checkpoints.path(variant))
    expected = references.continuations(variant)[:12]
    prompts = [c.prompt for c in expected]
    texts = [o.outputs[0].text for o in generate(llm, prompts)]
    stops = [text[8 + i : 11 + i] for i, text in enumerate(texts)]
    params = [GREEDY.clone(stop=stop) for stop in stops]
    made = at_both_depths(checkpoints, variant, prompts, params, **options)
    for text, stop, (_, cut, reason, stop_reason) in zip(texts, stops, made, strict=True):
        assert cut == text[: text.index(stop)]
        assert (reason, stop_reason) == ("stop", stop)


@pytest.mark.sampled(4)
@each_engine
def test_seeded_requests_of_all_kinds_say_the_same(checkpoints: Checkpoints, references: References, variant, options):
    draw = random.Random(3)
    expected = references.continuations(variant)[:10]
    params = [
        SamplingParams(
            temperature=draw.choice([0, 0.5, 1, 1.5]),
            top_p=draw.choice([1, 0.9]),
            top_k=draw.choice([0, 20]),
            min_p=draw.choice([0, 0.05]),
            seed=i,
            max_tokens=draw.randint(1, 60),
            min_tokens=draw.choice([0, 1]),
            stop_token_ids=draw.sample(range(4, 300), draw.choice([0, 3])),
            ignore_eos=draw.random() < 0.5,
        )
        for i in range(len(expected))
    ]
    made = at_both_depths(checkpoints, variant, [c.prompt for c in expected], params, **options)
    assert {reason for _, _, reason, _ in made} == {"length", "stop"}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.sampled(11)), 2])
@each_engine
def test_aborts_leave_the_others_as_they_were_and_nothing_behind(
    checkpoints: Checkpoints, references: References, variant, options, depth
):
    llm = make_llm(checkpoints.path(variant), **options)
    run_late(llm, depth)
    expected = references.continuations(variant)[:20]
    for i, continuation in enumerate(expected):
        llm.core.add_request(core_request(llm, str(i), continuation.prompt))
    draw = random.Random(depth)
    to_abort = [str(i) for i in range(0, 20, 2)]
    draw.shuffle(to_abort)
    made: dict[str, Any] = {}
    while llm.core.has_unfinished:
        if to_abort and draw.random() < 0.3:
            llm.core.abort_requests([to_abort.pop(), "never heard of"])
        collect(llm.core, made)
    assert_nothing_is_left(llm.core)
    for i, continuation in enumerate(expected):
        if i % 2:
            assert made[str(i)][1] == "length"
            continuation.check(made[str(i)][0])
        elif str(i) in made:  # what it had said when it was aborted
            said = made[str(i)][0]
            assert said[: continuation.certain] == continuation.token_ids[: min(len(said), continuation.certain)]


# ---- requests that the worker refuses


@pytest.fixture(
    params=[0, pytest.param(1, marks=pytest.mark.sampled(11)), 2], ids=["plain", "late, depth 1", "late, depth 2"]
)
def prepare(request: pytest.FixtureRequest) -> Any:
    """Puts an LLM on the plain executor, or on a late device."""

    def prepare(llm: LLM) -> LLM:
        if request.param:
            run_late(llm, request.param)
        return llm

    return prepare


def bad_request(llm: LLM, request_id: str, prompt: list[int], token: int = 99_999) -> Any:
    """One that the processor would not let through."""
    request = core_request(llm, request_id, prompt)
    request.prompt_token_ids = [*prompt, token]
    return request


@pytest.mark.sampled(12)
@each_engine
def test_a_request_that_the_worker_refuses_fails_alone(checkpoints, references, prepare, variant, options):
    llm = prepare(make_llm(checkpoints.path(variant), **options))
    expected = references.continuations(variant)[:12]
    arrivals = [core_request(llm, str(i), c.prompt) for i, c in enumerate(expected)]
    for place in (0, 4, 4, 9, len(arrivals)):  # first, two in a row, in the middle, last
        arrivals.insert(place, bad_request(llm, f"bad {len(arrivals)}", [7] * (place + 1), -1 if place == 9 else 320))
    made: dict[str, Any] = {}
    for i, request in enumerate(arrivals):
        llm.core.add_request(request)
        if i % 3 == 2:  # some come while others run
            collect(llm.core, made)
    while llm.core.has_unfinished:
        collect(llm.core, made)
    for i, continuation in enumerate(expected):
        assert made[str(i)][1] == "length"
        continuation.check(made[str(i)][0])
    failed = {name: outcome for name, outcome in made.items() if name.startswith("bad")}
    assert len(failed) == 5
    for token_ids, reason, why in failed.values():
        assert (token_ids, reason) == ([], "error")
        assert "is out of vocabulary; the model has 320 tokens" in why
    assert_nothing_is_left(llm.core)


@pytest.mark.sampled(3)
@each_variant
def test_what_a_refused_request_would_have_computed_is_not_in_the_prefix_cache(
    checkpoints, references, prepare, variant
):
    """It shares a beginning with requests of the same step, which must not read blocks that were never filled."""
    llm = prepare(make_llm(checkpoints.path(variant)))
    continuation = references.continuations(variant)[8]  # a prompt of 100 tokens
    prompt = continuation.prompt
    llm.core.add_request(bad_request(llm, "bad", prompt[:90]))
    llm.core.add_request(core_request(llm, "good", prompt))
    llm.core.add_request(core_request(llm, "same", prompt))
    made = finish(llm.core)
    assert made["bad"][1] == "error"
    continuation.check(made["good"][0])
    continuation.check(made["same"][0])
    assert_nothing_is_left(llm.core)


@pytest.mark.sampled(3)
def test_refusals_among_shared_prefixes_aborts_and_preemptions_leave_the_others_as_they_were(
    checkpoints, references, prepare
):
    """Steps are skipped while later ones are in flight, some of whose requests share blocks that were never filled."""
    llm = prepare(make_llm(checkpoints.path("llama"), **TIGHT))
    expected = references.continuations("llama")[:16]
    arrivals = []
    for i, continuation in enumerate(expected):
        if i % 3 == 0:
            arrivals.append(bad_request(llm, f"bad {i}", continuation.prompt))
        arrivals += [core_request(llm, f"{kind} {i}", continuation.prompt) for kind in ("kept", "aborted")]
    draw = random.Random(5)
    to_abort = [request.request_id for request in arrivals if request.request_id.startswith("aborted")]
    draw.shuffle(to_abort)
    made: dict[str, Any] = {}
    while arrivals or llm.core.has_unfinished:
        for request in arrivals[:3]:
            llm.core.add_request(request)
        del arrivals[:3]
        if not arrivals and to_abort and draw.random() < 0.3:
            llm.core.abort_requests([to_abort.pop()])
        collect(llm.core, made)
    assert_nothing_is_left(llm.core)
    assert llm.core.scheduler.epoch >= 3
    assert_preempted(llm)
    for i, continuation in enumerate(expected):
        continuation.check(made[f"kept {i}"][0])
        assert (made[f"bad {i}"][1] == "error") if i % 3 == 0 else (f"bad {i}" not in made)


def test_a_request_that_can_never_run_is_refused_when_it_is_added(checkpoints):
    llm = make_llm(checkpoints.path("llama"))
    request = core_request(llm, "long", [5] * 100)
    request.max_tokens = 100
    with pytest.raises(ValueError, match="100 tokens and max_tokens=100 do not fit max_model_len=176"):
        llm.core.add_request(request)
    llm.core.add_request(core_request(llm, "twice", [5]))
    with pytest.raises(ValueError, match="request id 'twice' is in use"):
        llm.core.add_request(core_request(llm, "twice", [5]))
    finish(llm.core)
    assert_nothing_is_left(llm.core)


# ---- token masks


class ChainMatcher:
    """After token t, only `following(t)` may come. Nothing counts as forced, so each token is drawn under a mask."""

    is_finished, error = False, None

    def __init__(self, last: int) -> None:
        self.last = last

    @staticmethod
    def following(token: int) -> int:
        return (7 * token + 5) % VOCAB

    def accept(self, token_id: int) -> bool:
        allowed, self.last = self.following(self.last), token_id
        return token_id == allowed

    def forced(self) -> list[int]:
        return []


class ChainGate(GrammarGate):
    """Requests named "chain ..." have a ChainMatcher."""

    def constraint(self, request: EngineCoreRequest) -> Constraint | None:
        is_chain = request.request_id.startswith("chain")
        return Constraint(ChainMatcher(request.prompt_token_ids[-1])) if is_chain else None

    def fill(self, constraints: Sequence[Constraint], bits: Any) -> None:
        bits[:] = 0
        for line, constraint in zip(bits.view(np.uint32), constraints, strict=True):
            token = ChainMatcher.following(constraint.matcher.last)
            line[token // 32] = 1 << token % 32


@pytest.mark.sampled(8)
@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.sampled(11)), True], ids=["plain", "late"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.sampled(11)), TIGHT], ids=["roomy", "tight"])
def test_masks_follow_the_tokens_of_the_step_before(checkpoints, references, late, depth, options):
    llm = make_llm(checkpoints.path("llama"), **options)
    scheduler = watched_scheduler(llm, depth, ChainGate(lambda: (None, [])))
    executor = LateExecutor(llm, scheduler) if late else llm.core.executor
    llm.core = EngineCore(scheduler, executor)
    expected = references.continuations("llama")[:12]
    made: dict[str, Any] = {}
    for i, continuation in enumerate(expected):
        name = f"chain {i}" if i % 2 else str(i)
        stop = {"stop_token_ids": [200]} if i % 4 == 3 else {}
        llm.core.add_request(core_request(llm, name, continuation.prompt, GREEDY.clone(**stop)))
        if i % 5 == 2:
            llm.core.add_request(bad_request(llm, f"chain bad {i}", continuation.prompt[:9]))
        if i % 3 == 2:
            collect(llm.core, made)
    llm.core.abort_requests(["chain 5"])
    while llm.core.has_unfinished:
        collect(llm.core, made)
    assert_nothing_is_left(llm.core)
    for i, continuation in enumerate(expected):
        if i % 2 == 0:
            continuation.check(made[str(i)][0])
        elif i != 5:
            tokens, reason, _ = made[f"chain {i}"]
            before = [continuation.prompt[-1], *tokens]
            assert tokens == [ChainMatcher.following(token) for token in before[:-1]]
            assert (reason == "stop") == (200 in tokens and i % 4 == 3)
    assert [made[f"chain bad {i}"][1] for i in (2, 7)] == ["error", "error"]
    if late:
        assert executor.most_in_flight == depth  # the forward pass of a step does not wait for its masks


# ---- failures


def test_a_fault_on_the_device_is_the_end_of_the_engine_and_every_later_call_says_so(checkpoints, monkeypatch):
    llm = make_llm(checkpoints.path("llama"))
    model = llm.core.executor.runner.model

    def fault(*arguments: Any) -> Any:
        raise RuntimeError("a bit flipped")

    stream = llm.stream([5, 6, 7], GREEDY)
    next(stream)
    monkeypatch.setattr(model, "forward", fault)
    with pytest.raises(EngineDeadError, match="the engine failed: a bit flipped") as raised:
        next(stream)
    assert isinstance(raised.value.__cause__, RuntimeError)
    monkeypatch.undo()
    with pytest.raises(EngineDeadError, match="a bit flipped"):
        llm.generate("again", use_tqdm=False)


@pytest.mark.parametrize("where", ["embed", "forward", "logits", "sampler"])
def test_after_ctrl_c_the_engine_goes_on(checkpoints, references, monkeypatch, where):
    llm = make_llm(checkpoints.path("llama"), enforce_eager=where == "forward")  # a recorded one is called but once
    expected = references.continuations("llama")[:6]
    runner, calls = llm.core.executor.runner, 0
    owner = runner if where == "sampler" else runner.model
    real = getattr(owner, where)

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([c.prompt for c in expected], GREEDY, use_tqdm=False)
    assert_nothing_is_left(llm.core)
    for continuation, output in zip(expected, generate(llm, [c.prompt for c in expected]), strict=True):
        continuation.check(output.outputs[0].token_ids)
