"""A request with a grammar says the same alone and among others, however its forced tokens are taken."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from quire.engine.core import EngineCore
from quire.engine.llm import LLM
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.messages.structured_outputs import ThinkingLimits
from quire.scheduler.scheduler import Scheduler
from support.checkpoints import Checkpoints
from support.engines import GREEDY, assert_nothing_is_left, assert_preempted, collect, core_request, finish, make_llm
from support.grammars import EOS, AutomatonBackend, automaton, automaton_gate, follows, grammar
from support.late_device import run_late

pytestmark = [pytest.mark.texts, pytest.mark.slow]

TIGHT = {"num_gpu_blocks_override": 28, "max_num_batched_tokens": 24, "max_num_seqs": 12}
VARIANTS = ["qwen3-mixed-windows-biases", pytest.param("llama", marks=pytest.mark.slow)]
VOCAB = 320
END = [7, 9]  # the marker behind the thinking
Outcome = tuple[list[int], str | None, Any]  # token ids, finish reason, stop reason


def with_grammars(llm: LLM, depth: int = 1, late: bool = False, captured: bool = False) -> AutomatonBackend:
    """Give the engine a new core whose requests may have grammars."""
    backend, gate = automaton_gate()
    if late:
        run_late(llm, depth, captured, gate)
        return backend
    old, cache, kv = llm.core.scheduler, llm.config.cache, llm.core.executor.kv_cache
    scheduler = Scheduler(
        old.limits,
        kv.num_blocks,
        list(kv.specs),
        cache.block_size,
        cache.enable_prefix_caching,
        grammars=gate,
        vocab_size=VOCAB,
        speculation=old.speculation,
    )
    llm.core = EngineCore(scheduler, llm.core.executor)
    return backend


@dataclass
class Asked:
    """A request, in the terms of the engine's user."""

    name: str
    prompt: list[int]
    params: SamplingParams
    grammar: int | str | None = None
    thinking: ThinkingLimits | None = None

    def request(self, llm: LLM, suffix: str = "", **params: Any) -> EngineCoreRequest:
        request: EngineCoreRequest = core_request(llm, self.name + suffix, self.prompt, self.params.clone(**params))
        assert request.sampling_params is not None
        if self.grammar is not None:
            request.sampling_params.structured_outputs = grammar(self.grammar)
        request.thinking = self.thinking
        return request


def mixed_requests(count: int, seed: int) -> list[Asked]:
    """Two of three have a grammar, some think first; parameters of all kinds, and prompts that share beginnings."""
    draw, document = random.Random(seed), [5 + 3 * i % 90 for i in range(60)]
    asked = []
    for i in range(count):
        prompt = [*document[: draw.choice([1, 15, 16, 40, 60])], 10 + i]
        params = SamplingParams(
            temperature=draw.choice([0, 0.7, 1.5]),
            seed=i,
            max_tokens=draw.choice([1, 9, 60, 90]),
            repetition_penalty=draw.choice([1.0, 1.3]),
            presence_penalty=draw.choice([0.0, 1.0]),
            top_k=draw.choice([0, 3]),
            min_tokens=draw.choice([0, 0, 1]),
            ignore_eos=draw.random() < 0.2,
            stop_token_ids=draw.sample(range(4, 300), draw.choice([0, 0, 0, 20])),
        )
        thinking = None
        if draw.random() < 0.3:
            thinking = ThinkingLimits(END, is_open=True, budget=draw.choice([0, 1, 5, None]))
        asked.append(Asked(str(i), prompt, params, 100 * seed + i if i % 3 else None, thinking))
    return asked


def run(llm: LLM, requests: Iterable[EngineCoreRequest]) -> dict[str, Outcome]:
    """The outcomes of requests that arrive two in a step. Afterwards nothing is left."""
    waiting, made = list(requests), dict[str, Outcome]()
    while waiting or llm.core.has_unfinished:
        for request in waiting[:2]:
            llm.core.add_request(request)
        del waiting[:2]
        collect(llm.core, made)
    assert_nothing_is_left(llm.core)
    assert llm.core.scheduler._constraints.count == 0
    return made


@pytest.fixture(scope="module", params=VARIANTS)
def alone(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> tuple[str, list[Asked], dict[str, Outcome]]:
    """Requests, and what each of them says alone, one forced token at a time."""
    llm = make_llm(checkpoints.path(request.param), enable_prefix_caching=False)
    with_grammars(llm)
    asked, said = mixed_requests(24, seed=len(request.param)), dict[str, Outcome]()
    for one in asked:
        said |= run(llm, [one.request(llm, logprobs=0)])
    for one in asked:
        if isinstance(one.grammar, int) and one.thinking is None and not one.params.ignore_eos:
            assert follows(one.grammar, said[one.name][0])
    assert {reason for _, reason, _ in said.values()} == {"length", "stop"}
    return request.param, asked, said


CORES = {
    "depth 1": {},
    "late, depth 1": {"late": True},
    "late, depth 2": {"late": True, "depth": 2},
    "late, depth 2, with graphs": {"late": True, "depth": 2, "captured": True},
}


@pytest.mark.sampled(13)
@pytest.mark.parametrize(
    ("core", "options"),
    [
        pytest.param("depth 1", {}, marks=pytest.mark.slow),
        pytest.param("late, depth 1", {}, marks=pytest.mark.slow),
        pytest.param("late, depth 2", {}, marks=pytest.mark.slow),
        ("late, depth 2, with graphs", {}),
        pytest.param("depth 1", TIGHT, marks=pytest.mark.slow),
        pytest.param("late, depth 1", TIGHT, marks=pytest.mark.slow),
        ("late, depth 2", TIGHT),
        pytest.param("late, depth 2, with graphs", TIGHT, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "tight" if value else "roomy",
)
def test_requests_with_grammars_say_together_what_each_says_alone(checkpoints, alone, core, options):
    variant, asked, said = alone
    llm = make_llm(checkpoints.path(variant), **options)
    grammars = with_grammars(llm, **CORES[core])
    together = run(llm, (one.request(llm) for one in asked))
    assert together == said
    if options:
        if variant != "llama":
            assert_preempted(llm)
        return
    taken_ahead, grammars.num_filled = grammars.num_filled, 0
    # Again with logprobs, so that all tokens are drawn, and with a warm prefix cache.
    assert run(llm, (one.request(llm, logprobs=i % 2) for i, one in enumerate(asked))) == said
    if not llm.core.scheduler.speculation.is_active:  # drafts need masks, too
        assert taken_ahead <= grammars.num_filled


def test_a_replayed_request_says_the_rest(checkpoints, alone):
    """Its output is cut anywhere: before, within and behind forced stretches and thinking."""
    variant, asked, said = alone
    llm = make_llm(checkpoints.path(variant))
    with_grammars(llm, depth=2, late=True)
    draw, requests, kept = random.Random(1), [], dict[str, list[int]]()
    for one in asked:
        token_ids = said[one.name][0]
        for cut in {0, len(token_ids) // 2, draw.randrange(len(token_ids)), len(token_ids) - 1}:
            request = one.request(llm, f" cut at {cut}")
            request.output_token_ids = kept[request.request_id] = token_ids[:cut]
            requests.append(request)
    for name, (rest, *end) in run(llm, requests).items():
        assert [kept[name] + rest, *end] == list(said[name.partition(" ")[0]])


@pytest.mark.plain("counts steps")
def test_forced_tokens_are_computed_in_fewer_steps(checkpoints):
    seed = max(range(50), key=lambda seed: sum(len(choices) == 1 for choices in automaton(seed)))
    steps = []
    for logprobs in (None, 0):
        llm = make_llm(checkpoints.path("llama"))
        with_grammars(llm)
        asked = Asked("a", [5, 6, 7], GREEDY.clone(ignore_eos=False, logprobs=logprobs), seed)
        llm.core.add_request(asked.request(llm))
        finish(llm.core)
        steps.append(llm.core.scheduler._num_steps)
    assert steps[0] < steps[1] / 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("first_seed", "reason"),
    [
        (-1, "it has grown too large"),
        (-101, "the library raises"),
        (-201, "the token mask could not be computed: BaseException: the library panics"),
    ],
)
def test_a_broken_constraint_ends_its_own_request_only(checkpoints, alone, first_seed, reason):
    variant, asked, said = alone
    for core in ("depth 1", "late, depth 2"):
        llm = make_llm(checkpoints.path(variant))
        with_grammars(llm, **CORES[core])
        params = GREEDY.clone(ignore_eos=False)
        broken = [Asked(f"broken {seed}", [5, 6, 7 + seed], params, first_seed - seed) for seed in range(8)]
        made = run(llm, [one.request(llm) for pair in zip(broken, asked, strict=False) for one in pair])
        for one in asked[: len(broken)]:
            assert made[one.name] == said[one.name]
        ended = {made[one.name][1:] for one in broken}
        assert ("error", reason) in ended


def test_gated_requests_are_refused_or_aborted_and_leave_nothing(checkpoints, alone):
    variant, asked, said = alone
    llm = make_llm(checkpoints.path(variant))
    backend = with_grammars(llm, depth=2, late=True)
    backend.may_compile.clear()
    for one in asked[:12]:
        llm.core.add_request(one.request(llm))
    llm.core.add_request(Asked("bad", [5, 6], GREEDY, "bad").request(llm))
    made: dict[str, Outcome] = {}
    plain = [one.name for one in asked[:12] if one.grammar is None]
    while not all(name in made and made[name][1] for name in plain):
        collect(llm.core, made)
    assert sorted(made) == sorted(plain)
    aborted = [one.name for one in asked[:6] if one.grammar is not None]
    llm.core.abort_requests(aborted)
    backend.may_compile.set()
    made |= finish(llm.core)
    assert_nothing_is_left(llm.core)
    assert made.pop("bad") == ([], "bad_request", "structured_outputs: the grammar has no end")
    assert made == {one.name: said[one.name] for one in asked[:12] if one.name not in aborted}


def test_constrained_requests_are_aborted_anywhere(checkpoints, alone):
    variant, asked, said = alone
    for core in ("depth 1", "late, depth 2"):
        llm = make_llm(checkpoints.path(variant), **TIGHT)
        with_grammars(llm, **CORES[core])
        draw, made = random.Random(5), dict[str, Outcome]()
        for one in asked:
            llm.core.add_request(one.request(llm))
        to_abort = [one.name for one in asked[::2]]
        while llm.core.has_unfinished:
            if to_abort and draw.random() < 0.4:
                llm.core.abort_requests([to_abort.pop()])
            collect(llm.core, made)
        assert_nothing_is_left(llm.core)
        for one in asked[1::2]:
            assert made[one.name] == said[one.name]


def test_a_finished_grammar_ends_a_request_below_min_tokens(checkpoints):
    """No token may follow, so that more cannot be had, not even behind accepted drafts."""
    suffixes: dict[str, Any] = {"speculative_config": {"method": "suffix", "adaptive": False}}
    for core, options in [*((core, {}) for core in CORES), ("depth 1", suffixes)]:
        llm = make_llm(checkpoints.path("llama"), **options)
        with_grammars(llm, **CORES[core])
        for logprobs in (None, 1):
            params = GREEDY.clone(ignore_eos=False, min_tokens=50, logprobs=logprobs, repetition_penalty=2.0)
            [(token_ids, *end)] = run(llm, [Asked("a", [5, 6, 7], params, 11).request(llm)]).values()
            assert end == ["stop", "the grammar allows no further token"]
            assert follows(11, [*token_ids, EOS])


def test_a_stop_token_within_a_forced_stretch_ends_the_request(checkpoints):
    seed = next(seed for seed in range(50) if all(len(choices) == 1 for choices in automaton(seed)[:9]))
    stretch = [next(iter(choices)) for choices in automaton(seed)[:9]]
    for core in CORES:
        llm = make_llm(checkpoints.path("llama"))
        with_grammars(llm, **CORES[core])
        params = GREEDY.clone(ignore_eos=False, stop_token_ids=[stretch[5]])
        made = run(llm, [Asked("a", [5, 6, 7], params, seed).request(llm)])
        assert made == {"a": (stretch[: stretch.index(stretch[5]) + 1], "stop", stretch[5])}


@pytest.mark.sampled(4)
@pytest.mark.nightly
@pytest.mark.parametrize("depth", [1, 2])
def test_two_processes_say_what_one_does(checkpoints, alone, depth):
    variant, asked, said = alone
    llm = make_llm(
        checkpoints.path(variant), tensor_parallel_size=2, async_scheduling=depth == 2, max_num_batched_tokens=40
    )
    try:
        with_grammars(llm)
        assert run(llm, (one.request(llm) for one in asked)) == said
    finally:
        llm.shutdown()
