"""What drafters guess in mixed batches, against a recomputation of each text by itself, from its beginning.

The hidden states come from transformers. The head is run over a whole text at once, as the papers write it down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.messages.sampling_params import SamplingParams
from support.checkpoints import Checkpoints
from support.drafters import CHAIN_HEADS, MASK, MTP_VARIANTS, STATE_HEADS, Drafted, Drafters, Guess, assert_right, watch
from support.engines import generate, make_llm
from support.heads import HeadText
from support.proposers import Perfect
from support.reference import References, load, prompts
from support.requests import with_grammars

TIGHT = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 24, "max_num_seqs": 12}
LONGEST = 176 + 8
WINDOWED = "qwen3-mixed-windows-biases"
SAMPLED = pytest.mark.sampled(6)
FEW_VARIANTS = ("deepseek_v3", "glm4_moe", "mimo", "qwen3_next")


@pytest.fixture(scope="module")
def drafters(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(checkpoints, tmp_path_factory)


class Chosen:
    """Chooses the most likely tokens, and notes how close the second best were."""

    def __init__(self, token_ids: Tensor | None = None) -> None:
        self.tokens: list[int] = []
        self.token_ids, self.gap = token_ids, 1.0

    def __call__(self, logits: Tensor, number: int = 0) -> Tensor:
        assert len(logits) == 1
        best = logits.topk(2)
        self.gap = min(self.gap, float(best.values[0, 0] - best.values[0, 1]))
        token = best.indices[:, 0] if self.token_ids is None else self.token_ids[best.indices[:, 0]]
        self.tokens.append(int(token))
        return token


class States:
    """The hidden states of texts: the final ones and those between layers, by transformers."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, text: list[int], taps: Any) -> list[Tensor]:
        """The final states, or those after the layers `taps`."""
        states = self.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        return [states[layer + 1][0] for layer in taps] if taps else [states[-1][0]]


def chain(head: Any, states: States) -> Guess:
    """The head's input at position i is the token at i + 1 with the hidden state at i; then each draft follows with
    the head's own output, or all masks do at once. Positions that the head has missed are left out."""

    @torch.inference_mode()
    def guess(text: list[int], count: int, missed: list[int] = []) -> tuple[list[int], float]:  # noqa: B006
        seen = [position for position in range(len(text) - 1) if position not in missed]
        hidden = head.combine([state[seen] for state in states(text, head.taps)])
        of_text, chosen = HeadText(head, "cpu", LONGEST // 16 + 1), Chosen(head.token_ids)
        made = of_text.run(head.embed(torch.tensor(text)[1:][seen], hidden), positions=torch.tensor(seen))[-1:]
        token, following = chosen(head.logits(made)), torch.arange(count - 1) + len(text) - 1
        if head.mask is not None and count > 1:
            mask, masked = head.mask
            x = head.embed(torch.full((count - 1,), mask), masked.expand(count - 1, -1))
            for state in of_text.run(x, positions=following).clone():
                chosen(head.logits(state[None]))
            return chosen.tokens, chosen.gap
        for position in following[:, None]:
            made = of_text.run(head.embed(token, made), positions=position)
            token = chosen(head.logits(made))
        return chosen.tokens, chosen.gap

    return guess


def side_by_side(head: Any, states: States) -> Guess:
    """The heads read the hidden state from which the newest token was drawn."""

    @torch.inference_mode()
    def guess(text: list[int], count: int) -> tuple[list[int], float]:
        chosen = Chosen()
        head.draft(states(text, ())[0][[len(text) - 2]], torch.tensor(text[-1:]), count, chosen)
        return chosen.tokens, chosen.gap

    return guess


def continued(model: Any) -> Guess:
    """The draft model's own greedy continuation."""

    @torch.inference_mode()
    def guess(text: list[int], count: int) -> tuple[list[int], float]:
        chosen = Chosen()
        for _ in range(count):
            chosen(model(torch.tensor([text + chosen.tokens])).logits[0, -1:])
        return chosen.tokens, chosen.gap

    return guess


def masked(model: Any) -> Guess:
    """PARD: masks follow the text, and each guesses the token after it."""

    @torch.inference_mode()
    def guess(text: list[int], count: int) -> tuple[list[int], float]:
        chosen = Chosen()
        for logits in model(torch.tensor([text + [MASK] * (count - 1)])).logits[0, -count:]:
            chosen(logits[None])
        return chosen.tokens, chosen.gap

    return guess


def greedy(count: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=20 + 4 * i, ignore_eos=True) for i in range(count)]


Run = Callable[..., Sequence[Drafted]]


@pytest.fixture
def run(drafters: Drafters, references: References) -> Run:
    """Runs a mixed batch whose drafts are partly accepted, and compares what was drafted."""

    def run(
        kind: str, target: str, guess_of: Any, guesser: str | None = "Mixed", lengths: Any = None, **options: Any
    ) -> Sequence[Drafted]:
        texts, path = prompts(320, 12), drafters.target(target)
        Perfect.learn(generate(make_llm(path), texts, greedy(len(texts))))
        config = drafters.config(kind, target)
        llm = make_llm(path, speculative_config=config, **options)
        watched = watch(llm, guesser)
        if lengths is not None:
            llm.core.scheduler.speculation.lengths = lengths
        generate(llm, texts, greedy(len(texts)))
        stats = llm.core.stats.speculation
        assert stats is not None
        assert 0.1 * stats.draft_tokens < stats.accepted_tokens < 0.95 * stats.draft_tokens
        assert stats.accepted_at[1] > 0
        part = getattr(watched.real, "head", None)
        assert_right(watched.made[:: 3 if lengths is None else 1], guess_of(part), at_least=45)
        return watched.made

    return run


@pytest.mark.slow
@pytest.mark.sampled(20)
@pytest.mark.parametrize("options", [pytest.param({}, marks=SAMPLED), TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize(
    ("kind", "target"),
    [
        *(pytest.param(kind, "llama", marks=SAMPLED) for kind in CHAIN_HEADS),
        pytest.param("eagle3", WINDOWED, marks=SAMPLED),
        ("p-eagle", WINDOWED),
        ("mtp", "deepseek_v3"),
        *(
            pytest.param("mtp", v, marks=[SAMPLED] if v in FEW_VARIANTS else [SAMPLED, pytest.mark.slow])
            for v in MTP_VARIANTS
            if v != "deepseek_v3"
        ),
    ],
)
def test_chains_of_drafts(run: Run, references: References, kind, target, options):
    model = references.model(target)
    run(kind, target, lambda head: chain(head, States(model)), enable_prefix_caching=False, **options)


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("eagle3", "llama"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("p-eagle", "llama"), ("mtp", "deepseek_v3"))),
    ],
)
def test_heads_that_have_missed_tokens_attend_to_those_that_they_have_seen(
    run: Run, references: References, kind, target
):
    """Drafts are wanted behind two of seven steps. The tokens of most of the others are missed."""
    steps = count()
    made = run(
        kind,
        target,
        lambda head: chain(head, States(references.model(target))),
        max_num_seqs=5,
        lengths=lambda *_: 4 * (next(steps) % 7 < 2),
        enable_prefix_caching=False,
    )
    assert max(len(drafted.missed) for drafted in made) > 16, "more than a block"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", STATE_HEADS)
def test_heads_side_by_side(run: Run, references: References, kind):
    run(kind, WINDOWED, lambda head: side_by_side(head, States(references.model(WINDOWED))), **TIGHT)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("options", [pytest.param({}, marks=SAMPLED), TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("similar", "llama"),
        ("pard", WINDOWED),
        pytest.param("similar", WINDOWED, marks=SAMPLED),
        pytest.param("pard", "llama", marks=SAMPLED),
    ],
)
def test_draft_models(run: Run, drafters: Drafters, kind, target, options):
    model = load(drafters.path(kind, target))
    run(kind, target, lambda _: (masked if kind == "pard" else continued)(model), None, **options)


@pytest.mark.parametrize("kind", [pytest.param("same", marks=pytest.mark.nightly), "pard"])
def test_draft_models_behind_tokens_that_a_grammar_forces(drafters: Drafters, kind):
    """Forced tokens differ from those that the draft model has guessed for their places."""
    path = drafters.target("llama")
    llm = make_llm(path, speculative_config=drafters.config(kind, "llama"))
    watched = watch(llm)
    params = [params.clone(temperature=0) for params in with_grammars(18)]
    generate(llm, [[5 + i, 9, 40, 7] for i in range(18)], params)
    model = load(drafters.path(kind, "llama"))
    assert_right(watched.made, (masked if kind == "pard" else continued)(model), at_least=45)
