"""Embeddings, learned positions and the head, whole and with the vocabulary split over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.embedding import LearnedPositions, LMHead, VocabParallelEmbedding
from support.layers import build_layer, draw, on_two_ranks

VOCAB = 37  # the first rank has 19, the second 18
IDS = torch.tensor([0, 18, 19, 36, 5, 19])
HIDDEN = draw("hidden", 4, 16)


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("is_head", [False, True])
def test_token_ids_pick_rows_of_the_table(is_head, kernels):
    embed, tensors = build_layer(lambda b: VocabParallelEmbedding(b, "embed", VOCAB, 16, is_head), kernels)
    assert torch.equal(embed(IDS), tensors["embed.weight"][IDS])


def test_each_rank_gets_the_rows_of_the_others():
    for result in on_two_ranks(lambda b: VocabParallelEmbedding(b, "embed", VOCAB, 16, False), IDS):
        assert torch.equal(result, draw("embed.weight", VOCAB, 16)[IDS])


def test_learned_positions_may_begin_behind_other_rows():
    positions, tensors = build_layer(lambda builder: LearnedPositions(builder, "positions", 20, 16, 2))
    assert tensors["positions.weight"].shape == (22, 16)
    at = torch.tensor([0, 19, 7])
    assert torch.equal(positions(at), tensors["positions.weight"][at + 2])


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_products_with_the_heads_own_table(bias, kernels):
    head, tensors = build_layer(lambda builder: LMHead(builder, "lm_head", VOCAB, 16, None, bias), kernels)
    wanted = HIDDEN @ tensors["lm_head.weight"].T + (tensors["lm_head.bias"] if bias else 0)
    torch.testing.assert_close(head(HIDDEN), wanted)


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_a_tied_head_multiplies_with_the_embedding(kernels):
    def make(builder: Builder) -> LMHead:
        embed = VocabParallelEmbedding(builder, "embed", VOCAB, 16, True)
        return LMHead(builder, "lm_head", VOCAB, 16, embed)

    head, tensors = build_layer(make, kernels)
    assert set(tensors) == {"embed.weight"}
    torch.testing.assert_close(head(HIDDEN), HIDDEN @ tensors["embed.weight"].T)


def test_every_rank_has_the_logits_of_the_whole_vocabulary():
    def wanted() -> Tensor:
        return HIDDEN @ draw("lm_head.weight", 38, 16).T + draw("lm_head.bias", 38)

    for result in on_two_ranks(lambda builder: LMHead(builder, "lm_head", 38, 16, None, True), HIDDEN):
        torch.testing.assert_close(result, wanted())
