"""Pictures in a step: features that are added to the results of layers, and tokens that see those behind them."""

from __future__ import annotations

import pytest
import torch

from quire.layers.step_media import StepMedia


def media(**fields) -> StepMedia:
    return StepMedia(torch.tensor([1, 3, 4]), torch.zeros(3, 2), **fields)


def test_features_are_added_to_the_results_of_their_layers_only():
    level = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    pictures = media(levels={2: level})
    x = torch.zeros(6, 2)
    pictures.add_level(1, x)
    assert not x.any()
    pictures.add_level(2, x)
    assert x.tolist() == [[0, 0], [1, 2], [0, 0], [3, 4], [5, 6], [0, 0]]


def test_features_are_added_to_the_results_that_are_wanted():
    level = torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    x = torch.zeros(3, 2)
    media(levels={0: level}).add_level(0, x, torch.tensor([5, 4, 1]))
    assert x.tolist() == [[0, 0], [5, 6], [1, 2]]


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_looking_ahead_and_back_is_attention_to_all(soft_cap):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 2, 4, generator=draw) for _ in range(3))
    out, lse = StepMedia(torch.arange(5), q, spans=[(1, 4)]).look_ahead(q, k, v, 0.5, soft_cap)
    assert lse[[0, 3, 4]].eq(float("-inf")).all()  # nothing of a span is behind these
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.5
    scores = scores if soft_cap is None else torch.tanh(scores / soft_cap) * soft_cap
    for query in (1, 2):
        behind = slice(query + 1, 4)
        weights = scores[:, query, behind].softmax(-1)
        torch.testing.assert_close(out[query], torch.einsum("hk,khd->hd", weights, v[behind]))
        torch.testing.assert_close(lse[query], scores[:, query, behind].logsumexp(-1))
