"""The sampler against a plain reference that treats one row at a time, and its draws against the distribution."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.ops import OPS, Kernels, Target
from quire.ops.cpu.build import library
from quire.ops.reference.drafts import draft_seeds
from quire.sampling.sampler import Proposals, Sampler, SamplingBatch
from support.sampling import chi_square, chi_square_bound, distribution, gumbel_scores

VOCAB = 101


@pytest.fixture(params=["reference", "cpu"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    if request.param == "cpu" and library() is None:
        pytest.skip("the CPU kernels cannot be compiled here")
    pins = dict.fromkeys(("sample_gumbel", "keep_top_k_top_p", "accept_or_resample"), request.param)
    kernels = Kernels(Target(torch.device("cpu"), torch.float32), pins)
    return Sampler(kernels, EngineConfig(), torch.device("cpu"))


def draw_tokens(sampler: Sampler, logits: Tensor, batch: SamplingBatch) -> Tensor:
    tokens, logprobs = sampler(logits.clone(), batch)
    assert logprobs is None
    return tokens


def expected_token(logits: list[float], row: dict[str, Any]) -> int:
    scores = logits
    if row["temperature"] > 0:
        allowed = distribution(logits, row["temperature"], row["top_k"], row["top_p"], row["min_p"])
        scores = gumbel_scores(allowed, row["seed"], row["position"])
    return max(range(len(logits)), key=lambda token: scores[token])


def batch_of(rows: list[dict[str, Any]]) -> SamplingBatch:
    """As the model runner makes it: what no row asks for is None."""

    random = [i for i, row in enumerate(rows) if row["temperature"] > 0]

    def column(name: str, nothing: float, dtype: torch.dtype) -> Tensor | None:
        values = [rows[i][name] for i in random]
        return None if all(v == nothing for v in values) else torch.tensor(values, dtype=dtype)

    return SamplingBatch(
        random=None if len(random) == len(rows) else torch.tensor(random),
        temperature=column("temperature", 0, torch.float32),
        seeds=column("seed", -1, torch.int64),
        output_positions=column("position", -1, torch.int64),
        top_k=column("top_k", VOCAB, torch.int64),
        top_p=column("top_p", 1, torch.float32),
        min_p=column("min_p", 0, torch.float32),
    )


OPTIONS: dict[str, list[Any]] = {
    "temperature": [0.3, 1.0, 2.0],
    "top_k": [1, 2, 10, 100, VOCAB],
    "top_p": [1.0, 0.99, 0.7, 0.2, 1e-6],
    "min_p": [0.0, 0.02, 0.5, 1.0],
}
NEUTRAL = {"temperature": 1.0, "top_k": VOCAB, "top_p": 1.0, "min_p": 0.0}


def rows_of(kind: str, count: int, draw: random.Random) -> list[dict[str, Any]]:
    """kind: one option that varies while the others ask for nothing; or "all"; or "mixed" with greedy rows."""
    rows = []
    for _ in range(count):
        chosen = {name: draw.choice(values) for name, values in OPTIONS.items() if kind in (name, "all", "mixed")}
        if kind == "mixed" and draw.random() < 0.4:
            chosen = {"temperature": 0}
        rows.append({**NEUTRAL, **chosen, "seed": draw.randrange(-(2**63), 2**63), "position": draw.randrange(5000)})
    return rows


@pytest.mark.parametrize("kind", [*OPTIONS, "all", "mixed"])
def test_every_row_is_drawn_as_if_it_were_alone(sampler, kind):
    draw, generator = random.Random(kind), torch.Generator().manual_seed(1)
    for count in (1, 2, 33):
        logits = torch.randn(count, VOCAB, generator=generator) * 3
        rows = rows_of(kind, count, draw)
        expected = [expected_token(row_logits, row) for row_logits, row in zip(logits.tolist(), rows, strict=True)]
        assert draw_tokens(sampler, logits, batch_of(rows)).tolist() == expected


def test_greedy_rows_take_the_largest_logit(sampler):
    logits = torch.randn(5, VOCAB)
    assert draw_tokens(sampler, logits, SamplingBatch()).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_may_have_two_bytes(sampler, dtype):
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = rows_of("all", 8, random.Random(1))
    expected = [expected_token(row_logits, row) for row_logits, row in zip(logits.float().tolist(), rows, strict=True)]
    assert draw_tokens(sampler, logits, batch_of(rows)).tolist() == expected


def test_equal_logits_leave_exactly_k_tokens_and_the_first_of_them(sampler):
    rows = [{**NEUTRAL, "top_k": 3, "seed": i, "position": 0} for i in range(200)]
    tokens = draw_tokens(sampler, torch.zeros(200, VOCAB), batch_of(rows)).tolist()
    assert set(tokens) == {0, 1, 2}
    rows = [{**NEUTRAL, "top_p": 0.5, "seed": i, "position": 0} for i in range(400)]
    tokens = draw_tokens(sampler, torch.zeros(400, 10), batch_of(rows)).tolist()
    assert set(tokens) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("what_varies", ["seed", "position"])
def test_draws_have_the_distribution_that_was_asked_for(sampler, options, what_varies):
    """Pearson's chi-square, with many seeds at one position and with one seed at many positions."""
    count, vocab = 20_000, 20
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 1.5
    rows = [{**NEUTRAL, "seed": 7, "position": 3, **options, what_varies: i} for i in range(count)]
    tokens = draw_tokens(sampler, logits.expand(count, vocab), batch_of(rows))
    observed = torch.bincount(tokens, minlength=vocab).tolist()
    asked = {**NEUTRAL, **options}
    wanted = distribution(logits.tolist(), asked["temperature"], asked["top_k"], asked["top_p"], asked["min_p"])
    freedom = sum(p > 0 for p in wanted) - 1
    assert chi_square(observed, wanted) < chi_square_bound(freedom)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{}, {"top_k": 8}, {"top_p": 0.8, "temperature": 1.3}, {"min_p": 0.05}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_have_their_distribution_although_a_grammar_cuts_off_some_drafts(sampler, options, dtype):
    """The places whose draft is forbidden have no draft. The others must not be treated as if all drafts had come."""
    count, vocab = 20_000, 20
    generator = torch.Generator().manual_seed(5)
    logits, drafter = torch.randn(2, vocab, generator=generator) * 1.5
    forbidden = torch.arange(vocab) % 3 == 1
    logits = logits.masked_fill(forbidden, -math.inf).to(dtype)
    batch = batch_of([{**NEUTRAL, "seed": i // 200, "position": i % 200, **options} for i in range(count)])
    drafts = OPS["sample_gumbel"].reference(
        drafter.expand(count, vocab), draft_seeds(batch.seeds), batch.output_positions
    )
    places = (~forbidden[drafts]).nonzero()[:, 0]
    batch.proposals = Proposals(places, drafter.expand(len(places), vocab), drafts[places])
    tokens = draw_tokens(sampler, logits.expand(count, vocab), batch)
    assert 0.1 < float((tokens == drafts).double().mean()) < 0.9
    asked = {**NEUTRAL, **options}
    wanted = distribution(logits.tolist(), asked["temperature"], asked["top_k"], asked["top_p"], asked["min_p"])
    observed = torch.bincount(tokens, minlength=vocab).tolist()
    assert chi_square(observed, wanted) < chi_square_bound(sum(p > 0 for p in wanted) - 1)


def test_drafts_from_the_distribution_itself_are_accepted(sampler):
    count, vocab = 500, 20
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5)).expand(count, vocab)
    batch = batch_of([{**NEUTRAL, "seed": i, "position": 3} for i in range(count)])
    drafts = OPS["sample_gumbel"].reference(logits, draft_seeds(batch.seeds), batch.output_positions)
    places = torch.arange(0, count, 2)
    batch.proposals = Proposals(places, logits[places], drafts[places])
    tokens = draw_tokens(sampler, logits, batch)
    assert (tokens == drafts)[places].double().mean() > 0.99  # all but for rounding
    assert (tokens == drafts)[places + 1].double().mean() < 0.5  # no drafts are given here


def test_draws_at_neighbouring_seeds_and_positions_are_independent(sampler):
    """Completion i uses seed + i, and token j position j: equal tokens must not run along either diagonal."""
    size = 150
    rows = [{**NEUTRAL, "seed": s, "position": p} for s in range(size) for p in range(size)]
    tokens = draw_tokens(sampler, torch.zeros(size * size, 10), batch_of(rows)).view(size, size)
    for shifted in (tokens.roll(1, 0), tokens.roll(1, 1), tokens.roll((1, 1), (0, 1)), tokens.roll((1, -1), (0, 1))):
        share = (tokens == shifted).float().mean().item()
        assert abs(share - 0.1) < 5 * math.sqrt(0.09 / size**2)
