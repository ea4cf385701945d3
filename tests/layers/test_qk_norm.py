"""Norms of queries and keys against their formulas, whole and split over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.layers.build import Builder
from quire.layers.qk_norm import make_qk_norm
from quire.layers.specs import NormSpec
from support.layers import build_layer, draw, on_two_ranks

HEADS, DIM, EPS = 4, 12, 0.1
X = 2 * draw("x", 5, HEADS, DIM) + 0.5


def rms(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x / (x.square().mean(dims, keepdim=True) + EPS).sqrt()


def centered(x: Tensor) -> Tensor:
    return rms(x - x.mean(-1, keepdim=True), (-1,))


def make(builder: Builder, kind: str, over: str, name: str = "q_norm"):
    """The norm of this rank's heads, as a function of all heads."""
    start, stop = builder.tensor_group.share(HEADS)
    norm = make_qk_norm(builder, name, NormSpec(kind, EPS), over, DIM, HEADS, range(start, stop), 1.0)
    return lambda x: norm(x[:, start:stop])


FORMULAS = {
    ("rms", "head"): lambda tensors: rms(X, (-1,)) * tensors["q_norm.weight"],
    ("layer", "head"): lambda tensors: centered(X) * tensors["q_norm.weight"],
    ("layer", "heads"): lambda tensors: centered(X) * tensors["q_norm.weight"],
    ("rms", "all"): lambda tensors: rms(X, (-2, -1)) * tensors["q_norm.weight"].view(HEADS, DIM),
}
SHAPES = {"head": (DIM,), "heads": (HEADS, DIM), "all": (HEADS * DIM,)}


@pytest.mark.parametrize(("kind", "over"), FORMULAS)
def test_one_weight_for_all_heads_or_one_for_each_or_all_as_one_vector(kind, over):
    norm, tensors = build_layer(lambda builder: make(builder, kind, over))
    assert tensors["q_norm.weight"].shape == SHAPES[over]
    wanted = FORMULAS[kind, over](tensors)
    torch.testing.assert_close(norm(X), wanted)
    parts = on_two_ranks(lambda builder: make(builder, kind, over), X)
    torch.testing.assert_close(torch.cat(parts, dim=1), wanted)


def test_a_tensor_for_each_head():
    name = "q_norm.{h}"
    norm, tensors = build_layer(lambda builder: make(builder, "layer", "heads", name))
    wanted = centered(X) * torch.stack([tensors[f"q_norm.{head}.weight"] for head in range(HEADS)])
    torch.testing.assert_close(norm(X), wanted)
    parts = on_two_ranks(lambda builder: make(builder, "layer", "heads", name), X)
    torch.testing.assert_close(torch.cat(parts, dim=1), wanted)


def test_heads_that_several_ranks_keep_are_counted_once():
    """One KV head on two ranks."""

    def copies(builder: Builder):
        return make_qk_norm(builder, "k_norm", NormSpec("rms", EPS), "all", DIM, 1, range(1), 0.5)

    x = X[:, :1]
    for result in on_two_ranks(copies, x):
        torch.testing.assert_close(result, rms(x, (-2, -1)) * draw("k_norm.weight", DIM))
