"""Sparse attention of the Triton backend, on a GPU or under Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
import torch
from attention.test_attention import BFLOAT16, CELLS, FLOAT32, Kept
from attention.test_sparse import SparseWorld

import quire.attention.triton.select
from quire.attention.triton.attention_backend import TritonAttention

pytestmark = pytest.mark.usefixtures("interpreter")

ROUNDING = 2**-6
REQUESTS = [(0, 1), (20, 1), (24, 3)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "kept",
    [*(pytest.param(kept, marks=pytest.mark.sampled(6)) for kept in (FLOAT32, BFLOAT16, *CELLS)), Kept(torch.float16)],
    ids=str,
)
def test_a_token_attends_to_the_tokens_with_the_highest_scores(kept):
    SparseWorld(TritonAttention, kept, REQUESTS).check(1e-5 if kept.dtype is torch.float32 else ROUNDING)


def test_the_scores_of_selected_keys():
    SparseWorld(TritonAttention, FLOAT32, REQUESTS).check_scores(1e-4)


@pytest.mark.slow
def test_of_equal_scores_the_first_win(monkeypatch):
    monkeypatch.setattr(quire.attention.triton.select, "_MOST_SCORES", 64)  # a token at a time
    SparseWorld(TritonAttention, FLOAT32, REQUESTS, same_keys=True).check(1e-5)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("invariant", [False, True])
def test_long_texts_have_several_programs(monkeypatch, invariant):
    monkeypatch.setattr(quire.attention.triton.select, "_RUN", 64)
    SparseWorld(TritonAttention, FLOAT32, [(150, 1), (0, 4)], 32, 8, 48, 32, 17, 32, invariant=invariant).check(1e-5)
