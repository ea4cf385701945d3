"""The op that verifies drafts by the p/q rule: its tokens have the target's distribution, whatever the drafter's is."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from quire.ops import OPS
from quire.ops.reference.drafts import ACCEPTANCE, RESAMPLING, draft_seeds
from quire.ops.reference.sampling import gumbel_noise, uniform_noise
from quire.ops.registry import Implementation, Target
from support.implementations import for_cpus

DRAWS, VOCAB = 20_000, 37
Pair = tuple[Tensor, Tensor]  # the logits of the target and of the drafter: [VOCAB] each


@pytest.fixture(params=for_cpus("accept_or_resample"), ids=lambda i: i.name)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    if not request.param.supports(Target(torch.device("cpu"), torch.float32)):
        pytest.skip("not supported here")
    return request.param


def logits(seed: int) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def only(x: Tensor, allowed: Tensor) -> Tensor:
    return x.masked_fill(~allowed, -torch.inf)


def peaked() -> Pair:
    q = logits(1).clone()
    q[3] += 8
    return logits(0), q


TOKEN = torch.arange(VOCAB)
PAIRS: dict[str, Callable[[], Pair]] = {
    "equal": lambda: (logits(0), logits(0)),
    "similar": lambda: (logits(0), logits(0) + logits(1) / 4),
    "unrelated": lambda: (logits(0), logits(1)),
    "overlapping": lambda: (only(logits(0), TOKEN < 25), only(logits(1), TOKEN > 12)),
    "disjoint": lambda: (only(logits(0), TOKEN < 15), only(logits(1), TOKEN > 20)),
    "target with top-k": lambda: (only(logits(0), logits(0) >= logits(0).topk(5).values[-1]), logits(1)),
    "both with top-k": lambda: tuple(only(x, x >= x.topk(6).values[-1]) for x in (logits(0), logits(0) + logits(1))),
    "target with a mask": lambda: (only(logits(0), TOKEN % 3 == 0), logits(0) + logits(1) / 2),
    "one allowed token": lambda: (only(logits(0), TOKEN == 5), logits(1)),
    "peaked drafter": peaked,
    "peaked target": lambda: peaked()[::-1],
    "flat drafter": lambda: (logits(0), torch.zeros(VOCAB)),
}
pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=list(PAIRS))


def verified(implementation: Implementation, p: Tensor, q: Tensor, drafts: Tensor | None = None) -> Pair:
    """The drafts and what the op makes of them, with a hundred neighbouring seeds at 200 positions."""
    seeds, positions = torch.arange(DRAWS) // 200, torch.arange(DRAWS) % 200
    if drafts is None:
        drafts = OPS["sample_gumbel"].reference(q.expand(DRAWS, -1), draft_seeds(seeds), positions)
    return drafts, implementation.function(p.expand(DRAWS, -1), q.expand(DRAWS, -1), drafts, seeds, positions)


@cache
def verified_pair(implementation: Implementation, pair: Callable[[], Pair]) -> Pair:
    return verified(implementation, *pair())


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Of Pearson's chi-square test, by Wilson and Hilferty's approximation. Tokens that are expected less than 5 times
    are one class."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    assert observed[expected == 0].sum() == 0
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    if freedom == 0:
        return 1.0
    chi_square = float(((observed - expected).square() / expected).sum())
    spread = 2 / (9 * freedom)
    return math.erfc(((chi_square / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(2 * spread)) / 2


@pytest.mark.sampled(8)
@pairs
def test_tokens_have_the_distribution_of_the_target(implementation: Implementation, pair: Callable[[], Pair]):
    p, q = pair()
    drafts, tokens = verified_pair(implementation, pair)
    assert p_value(drafts.bincount(minlength=VOCAB), q.softmax(-1)) > 1e-4
    assert p_value(tokens.bincount(minlength=VOCAB), p.softmax(-1)) > 1e-4


@pytest.mark.sampled(6)
@pairs
def test_as_many_drafts_are_accepted_as_the_distributions_have_in_common(
    implementation: Implementation, pair: Callable[[], Pair]
):
    p, q = pair()
    drafts, tokens = verified_pair(implementation, pair)
    common = float(torch.minimum(p.softmax(-1), q.softmax(-1)).sum())
    noise = math.sqrt(common * max(1 - common, 0) / DRAWS)
    assert abs(float((drafts == tokens).double().mean()) - common) <= 4 * noise + 1e-6


@pairs
def test_rejected_drafts_leave_what_the_target_has_more_of(implementation: Implementation, pair: Callable[[], Pair]):
    p, q = pair()
    drafts, tokens = verified_pair(implementation, pair)
    residual = (p.softmax(-1) - q.softmax(-1)).clamp(min=0)
    rejected = tokens[tokens != drafts]
    if len(rejected):
        assert p_value(rejected.bincount(minlength=VOCAB), residual / residual.sum()) > 1e-4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["no draft", "NaN", "infinity", "nothing allowed", "excluded draft"])
def test_without_a_usable_draft_the_token_is_drawn_from_the_target(implementation: Implementation, case: str):
    p, q = logits(0), logits(1)
    drafts = torch.full((DRAWS,), -1 if case == "no draft" else 4)
    if case == "nothing allowed":
        q = torch.full_like(q, -torch.inf)
    elif case != "no draft":
        q[20 if case != "excluded draft" else 4] = {"NaN": math.nan, "infinity": math.inf}.get(case, -math.inf)
    _, tokens = verified(implementation, p, q, drafts)
    assert p_value(tokens.bincount(minlength=VOCAB), p.softmax(-1)) > 1e-4


def test_drafts_of_the_target_itself_are_all_accepted(implementation: Implementation):
    drafts, tokens = verified(implementation, logits(0), logits(0))
    assert torch.equal(drafts, tokens)


def test_accepted_and_resampled_tokens_are_those_of_the_papers_formulas(implementation: Implementation):
    """The algorithm place by place, in float64. No draw is so close that float32 decides otherwise."""
    generator = torch.Generator().manual_seed(3)
    p, q = torch.randn(200, 61, generator=generator), torch.randn(200, 61, generator=generator)
    seeds = torch.randint(-(2**63), 2**63 - 1, (200,), generator=generator)
    positions = torch.randint(0, 1000, (200,), generator=generator)
    drafts = OPS["sample_gumbel"].reference(q, draft_seeds(seeds), positions)
    uniform = uniform_noise(seeds ^ ACCEPTANCE, positions, 1)[:, 0].double()
    noise = gumbel_noise(seeds ^ RESAMPLING, positions, 61).double()
    wanted = []
    for place, draft in enumerate(drafts.tolist()):
        target, drafter = p[place].double().softmax(-1), q[place].double().softmax(-1)
        if uniform[place] < target[draft] / drafter[draft]:
            wanted.append(draft)
        else:
            wanted.append(int(((target - drafter).clamp(min=0).log() + noise[place]).argmax()))
    assert implementation.function(p, q, drafts, seeds, positions).tolist() == wanted
    assert 20 < sum(w == d for w, d in zip(wanted, drafts.tolist(), strict=True)) < 180


def test_a_place_depends_on_nothing_but_itself(implementation: Implementation):
    generator = torch.Generator().manual_seed(4)
    p, q = torch.randn(9, 9001, generator=generator), torch.randn(9, 9001, generator=generator)
    seeds, positions = torch.arange(9) * 2**40, torch.arange(9) + 7
    drafts = OPS["sample_gumbel"].reference(q, draft_seeds(seeds), positions)
    arguments = p, q, drafts, seeds, positions
    together = implementation.function(*arguments)
    assert together.tolist() == [int(implementation.function(*(x[i : i + 1] for x in arguments))) for i in range(9)]


def test_the_streams_of_a_seed_are_independent():
    seeds, positions = torch.arange(200), torch.arange(200)
    keys = seeds, seeds ^ ACCEPTANCE, seeds ^ RESAMPLING, draft_seeds(seeds)
    noise = torch.stack([uniform_noise(key, positions, 500).flatten() for key in keys])
    assert (torch.corrcoef(noise) - torch.eye(4)).abs().max() < 0.015  # five standard deviations
