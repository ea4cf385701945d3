"""Drafters on the device: answers are those without them, and what a good drafter guesses is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.engine.llm import LLM
from quire.messages.outputs import RequestOutput
from quire.messages.sampling_params import SamplingParams
from support.checkpoints import Checkpoints
from support.drafters import KINDS, MTP_VARIANTS, Drafters, watch
from support.engines import GREEDY, generate, make_llm, tokens_of
from support.late_device import run_late
from support.proposers import Perfect
from support.reference import References, prompts
from support.requests import requests, said, with_grammars

TIGHT = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 24, "max_num_seqs": 12}
WINDOWED = "qwen3-mixed-windows-biases"
ALL = [
    *((kind, variant) for variant in ("llama", WINDOWED) for kind in KINDS),
    *(("mtp", variant) for variant in MTP_VARIANTS),
]
FAST = [("similar", "llama"), ("p-eagle", WINDOWED), ("mtp", "deepseek_v3")]

SAMPLED = pytest.mark.sampled(6)
OTHERS = ("Adversarial", "Random", "Perfect")

Pair = tuple[str, str]


def each(fast: list[Pair]) -> pytest.MarkDecorator:
    """Each kind of drafter with each variant; `fast` are those that are not slow. The model with windows is left to the
    night."""

    def marks(pair: Pair) -> list[pytest.MarkDecorator]:
        if pair in fast:
            return []
        return [pytest.mark.nightly] if pair[1] == WINDOWED else [pytest.mark.slow, pytest.mark.sampled(8)]

    pairs = [pytest.param(*pair, id="-".join(pair), marks=marks(pair)) for pair in ALL]
    return pytest.mark.parametrize(("kind", "target"), pairs)


@pytest.fixture(scope="module")
def drafters(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(checkpoints, tmp_path_factory)


class Plain:
    """What is said without speculation."""

    def __init__(self, drafters: Drafters) -> None:
        self.drafters = drafters
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.engines: dict[str, LLM] = {}

    def engine(self, target: str) -> LLM:
        if target not in self.engines:
            self.engines[target] = make_llm(self.drafters.target(target))
        return self.engines[target]

    def all_kinds(self, target: str, count: int) -> tuple[Any, Any, list[RequestOutput]]:
        """Prompts, parameters of all kinds, and what is said."""
        texts, params = prompts(320, 20), requests(20)
        if target not in self.outputs:
            self.outputs[target] = generate(self.engine(target), texts, params)
        return texts[:count], params[:count], self.outputs[target][:count]


@pytest.fixture(scope="module")
def plain(drafters: Drafters) -> Plain:
    return Plain(drafters)


Start = Callable[..., LLM]


@pytest.fixture
def start(drafters: Drafters) -> Start:
    """Starts an engine that speculates."""

    def start(kind: str, target: str, speculation: dict[str, Any] | None = None, **options: Any) -> LLM:
        config = drafters.config(kind, target, **(speculation or {}))
        return make_llm(drafters.target(target), speculative_config=config, **options)

    return start


@pytest.mark.sampled(56)
@each(FAST)
@pytest.mark.parametrize("options", [pytest.param({}, marks=SAMPLED), TIGHT], ids=["roomy", "tight"])
def test_requests_of_all_kinds_say_the_same(plain: Plain, start: Start, kind, target, options):
    texts, params, expected = plain.all_kinds(target, 14)
    llm = start(kind, target, **options)
    assert said(generate(llm, texts, params)) == said(expected)
    assert said(generate(llm, texts, params)) == said(expected), "with their prompts in the prefix cache"
    stats = llm.core.stats.speculation
    assert stats.draft_tokens > 300
    assert sum(stats.accepted_at) == stats.accepted_tokens
    if kind in ("same", "similar"):
        assert stats.accepted_tokens / stats.draft_tokens > 0.2


@pytest.mark.sampled(4)
@each([])
@pytest.mark.parametrize("guesser", ["Mixed", *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def test_any_drafts_say_the_same(plain: Plain, start: Start, kind, target, guesser):
    texts, params, expected = plain.all_kinds(target, 20)
    Perfect.learn(expected)
    llm = start(kind, target, **TIGHT)
    watch(llm, guesser)
    assert said(generate(llm, texts, params)) == said(expected)
    stats = llm.core.stats.speculation
    if guesser == "Perfect":
        assert stats.accepted_tokens > 0.8 * stats.draft_tokens


@pytest.mark.sampled(4)
@each([])
def test_adaptive_numbers_of_drafts_say_the_same(plain: Plain, start: Start, kind, target):
    texts, params, expected = plain.all_kinds(target, 20)
    llm = start(kind, target, {"adaptive": True})
    assert said(generate(llm, texts, params)) == said(expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "target"), [("eagle3", "llama"), pytest.param("similar", "llama", marks=SAMPLED), ("mtp", "mimo")]
)
def test_the_costs_of_drafts_are_measured_without_compiled_kernels_too(start: Start, kind, target):
    """PyTorch's operations check the shapes of what the dummy steps give them."""
    llm = start(kind, target, {"adaptive": True}, backend="reference")
    costs = llm.core.executor.step_costs
    assert min(*costs.first_draft.values(), *costs.steps.values()) > 0
    assert len(generate(llm, [[5, 9, 40, 7]], [GREEDY])) == 1


@each(FAST[:1])
def test_stop_strings_within_accepted_drafts_end_the_answer(plain: Plain, start: Start, kind, target):
    texts = prompts(320, 8)
    expected = generate(plain.engine(target), texts)
    Perfect.learn(expected)
    stops = [output.outputs[0].text[9 + i : 12 + i] for i, output in enumerate(expected)]
    llm = start(kind, target)
    watch(llm, "Perfect")
    found = generate(llm, texts, [GREEDY.clone(stop=stop) for stop in stops])
    for output, before, stop in zip(found, expected, stops, strict=True):
        assert output.outputs[0].text == before.outputs[0].text[: before.outputs[0].text.index(stop)]
        assert output.outputs[0].stop_reason == stop


@each(FAST[:1])
def test_drafts_keep_to_the_grammar(plain: Plain, start: Start, kind, target):
    params = with_grammars(8)
    texts = [[5 + i, 9, 40, 7] for i in range(8)]
    expected = generate(plain.engine(target), texts, params)
    Perfect.learn(expected)
    llm = start(kind, target)
    assert said(generate(llm, texts, params)) == said(expected)
    watch(llm, "Mixed")
    assert said(generate(llm, texts, params)) == said(expected)


@pytest.mark.parametrize("options", [pytest.param({}, marks=SAMPLED), TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("temperature", [pytest.param(0, marks=SAMPLED), 0.9])
def test_a_draft_model_that_is_the_model_itself_is_always_right(
    plain: Plain, references: References, start: Start, options: dict[str, Any], temperature: float
):
    texts = [continuation.prompt for continuation in references.continuations("llama")[:12]]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=30 + i, ignore_eos=True, top_k=20 * (i % 2))
        for i in range(len(texts))
    ]
    llm = start("same", "llama", **options)
    assert tokens_of(generate(llm, texts, params)) == tokens_of(generate(plain.engine("llama"), texts, params))
    stats = llm.core.stats.speculation
    assert stats is not None
    assert stats.draft_tokens > 200
    assert stats.accepted_tokens == stats.draft_tokens


def test_long_texts_get_no_drafts(plain: Plain, start: Start):
    texts, params = prompts(320, 8), GREEDY.clone(max_tokens=24, ignore_eos=True)
    llm = start("same", "llama", {"max_model_len": 50})
    watched = watch(llm)
    assert tokens_of(generate(llm, texts, params)) == tokens_of(generate(plain.engine("llama"), texts, params))
    lengths = {len(made.text) + len(made.drafts) for made in watched.made}
    assert min(lengths) < max(lengths) == 50 < max(map(len, texts))


@pytest.mark.sampled(16)
@each([("eagle3", "llama"), ("medusa", "llama"), ("mtp", "mimo")])
@pytest.mark.parametrize("depth", [pytest.param(1, marks=SAMPLED), 2])
def test_a_late_device_says_the_same(plain: Plain, start: Start, kind, target, depth):
    """All kernels are operations of torch, which the device runs late."""
    texts, params = (
        prompts(320, 9)[:6],
        [GREEDY.clone(max_tokens=12), GREEDY.clone(max_tokens=12, temperature=1, seed=3)],
    )
    expected = tokens_of(generate(plain.engine(target), texts, params * 3))
    llm = start(kind, target, backend="reference", max_num_batched_tokens=48)
    late = run_late(llm, depth)
    assert tokens_of(generate(llm, texts, params * 3)) == expected
    assert late.waits == late.runner.device.waits, "but for memory of earlier uploads, nothing is waited for"
    assert late.most_in_flight == depth
    assert llm.core.stats.speculation.draft_tokens > 40


@pytest.mark.parametrize("options", [{}, TIGHT], ids=["roomy", "tight"])
def test_a_prefix_that_was_computed_without_drafts_is_computed_by_the_draft_model(start: Start, options):
    """While no drafts are worth their cost, the draft model computes nothing, but the prefix cache fills."""
    llm = start("same", "llama", **options)
    prefix, speculation = prompts(320, 9)[8], llm.core.scheduler.speculation
    lengths, speculation.lengths = speculation.lengths, lambda *arguments: 0
    generate(llm, [[*prefix, 9]], GREEDY.clone(max_tokens=5))
    speculation.lengths = lengths
    for _ in range(2):
        generate(llm, [[*prefix, 20 + i] for i in range(6)], GREEDY.clone(max_tokens=30))
    stats = llm.core.stats.speculation
    assert stats.draft_tokens > 100
    assert stats.accepted_tokens == stats.draft_tokens
