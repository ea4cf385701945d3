"""Linear layers against x W^T + b of the whole weight, in every layout and split."""

from __future__ import annotations

import pytest
import torch

from quire.layers.build import Builder
from quire.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from quire.layers.specs import OutputPart
from support.layers import build_layer, draw, on_two_ranks

X = draw("x", 5, 24)


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("bias", [False, True])
def test_parts_of_several_tensors_are_one_product(kernels, bias):
    parts = [OutputPart("q", 32, 8, 24), OutputPart("k", 6, 0, 6), OutputPart("q", 32, 0, 4)]
    layer, tensors = build_layer(lambda builder: ColumnParallelLinear(builder, 24, parts, bias), kernels)
    wanted = []
    for name, rows in (("q", slice(8, 24)), ("k", slice(0, 6)), ("q", slice(0, 4))):
        product = X @ tensors[f"{name}.weight"][rows].T
        wanted.append(product + tensors[f"{name}.bias"][rows] if bias else product)
    torch.testing.assert_close(layer(X), torch.cat(wanted, dim=1))


def test_a_transposed_weight_is_kept_as_inputs_by_outputs():
    parts = [OutputPart("c_attn", 30, 10, 20)]
    layer, tensors = build_layer(lambda builder: ColumnParallelLinear(builder, 24, parts, transposed=True))
    assert tensors["c_attn.weight"].shape == (24, 30)
    torch.testing.assert_close(layer(X), X @ tensors["c_attn.weight"][:, 10:20])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_ranks_add_up_shares_of_the_inputs_and_the_bias_once(bias, transposed):
    def share(builder: Builder):
        start, stop = (8 * bound for bound in builder.tensor_group.share(3))
        layer = RowParallelLinear(builder, "o", 24, (start, stop), 7, bias, transposed)
        return lambda x: layer(x[:, start:stop])

    _, tensors = build_layer(lambda builder: RowParallelLinear(builder, "o", 24, (0, 24), 7, bias, transposed))
    weight = tensors["o.weight"]
    wanted = X @ (weight if transposed else weight.T) + (tensors["o.bias"] if bias else 0)
    torch.testing.assert_close(sum(on_two_ranks(share, X)), wanted)  # of three heads, one rank has two


def test_a_rank_with_a_copy_adds_nothing():
    def copy(builder: Builder):
        return RowParallelLinear(builder, "o", 24, (0, 24), 7, True, is_copy=builder.tensor_group.rank == 1)

    whole, nothing = on_two_ranks(copy, X)
    torch.testing.assert_close(whole, X @ draw("o.weight", 7, 24).T + draw("o.bias", 7))
    assert torch.equal(nothing, torch.zeros(5, 7))


def test_a_replicated_layer_is_whole_on_every_rank():
    for result in on_two_ranks(lambda builder: ReplicatedLinear(builder, "gate", 24, 3, bias=True), X):
        torch.testing.assert_close(result, X @ draw("gate.weight", 3, 24).T + draw("gate.bias", 3))


def test_fused_parts_in_different_formats_are_an_error():
    def make(builder: Builder):
        builder.method_of = {"q": "one", "k": "another"}.__getitem__
        return ColumnParallelLinear(builder, 24, [OutputPart("q", 4, 0, 4), OutputPart("k", 4, 0, 4)])

    with pytest.raises(ValueError, match="q, k are computed as one, but quantized differently"):
        build_layer(make)
