"""The method replay: drafts are accepted at the given rates, whatever they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.config.speculative import SpeculativeOptions
from quire.messages.sampling_params import SamplingParams
from quire.worker.drafters.replay import ReplayedCounts
from support.checkpoints import Checkpoints
from support.engines import generate, make_llm, runner_of, tokens_of

PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
REPLAY = {"method": "replay", "num_speculative_tokens": 4, "adaptive": False}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("rates", "accepted_at"), [([1.0], [1, 1, 1, 1]), ([1.0, 1.0, 0.0], [1, 1, 0, 0]), ([0], [0])])
@pytest.mark.parametrize("drafts", [{}, {"draft_method": "draft_model"}], ids=["newest_token", "draft_model"])
def test_drafts_are_accepted_as_the_rates_say(
    checkpoints: Checkpoints, rates: list[float], accepted_at: list[int], drafts: dict[str, Any]
):
    path = checkpoints.path("llama")
    model = {"model": str(path)} if drafts else {}
    llm = make_llm(path, speculative_config={**REPLAY, **drafts, **model, "acceptance_rates": rates})
    prompts = [[5 + i, 9, 40, 7] for i in range(3)]
    assert [len(tokens) for tokens in tokens_of(generate(llm, prompts, [PARAMS] * 3))] == [40] * 3
    stats = llm.core.stats.speculation
    assert stats is not None
    assert stats.drafts > 20
    assert stats.accepted_tokens == sum(stats.accepted_at)
    full = stats.drafts - 3  # the last step of a request may have fewer drafts
    assert all(count >= full if at else not count for count, at in zip(stats.accepted_at, accepted_at, strict=False))


def test_the_counts_have_the_distribution_of_the_rates_and_repeat_themselves(checkpoints: Checkpoints):
    """Every fourth request samples without drafts, and every fifth computes a part of its prompt."""
    staging = runner_of(make_llm(checkpoints.path("llama"), max_num_seqs=2)).staging
    staging.batch.seed[:] = 3, 4
    rates, requests = [0.9, 0.5, 0.8], 20_000
    options = SpeculativeOptions("replay", 3, acceptance_rates=tuple(rates))
    places = np.full(requests, 4)
    places[::4], places[::5] = 1, 0
    start = torch.tensor([0, *places.cumsum()])
    rows = torch.arange(int(start[-1])) % 2
    arguments = torch.empty(0), rows, torch.arange(len(rows)), rows, start
    kept = ReplayedCounts(options, staging.device, staging.batch)(*arguments)
    assert torch.equal(kept, ReplayedCounts(options, staging.device, staging.batch)(*arguments))
    counts = np.bincount(kept[places == 4].numpy(), minlength=5) / (places == 4).sum()
    expected = [0, 0.1, 0.9 * 0.5, 0.9 * 0.5 * 0.2, 0.9 * 0.5 * 0.8]
    assert np.abs(counts - expected).max() < 0.015
    assert (kept[places == 1] == 1).all()
    assert not kept[places == 0].any()
