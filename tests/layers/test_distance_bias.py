"""Biases by distance: the buckets are those of transformers' T5, and the table is made of the checkpoint's biases."""

from __future__ import annotations

import pytest
import torch

from quire.layers.attention_spec import AttentionSpec, Buckets
from quire.layers.distance_bias import buckets_by_distance, distance_bias
from support.layers import build_layer

SIZES = [Buckets(32, 128), Buckets(32, 256), Buckets(4, 3), Buckets(7, 20), Buckets(12, 40), Buckets(64, 1000)]


@pytest.mark.parametrize("two_way", [False, True])
@pytest.mark.parametrize("buckets", SIZES, ids=lambda b: f"{b.count}-{b.reach}")
def test_the_buckets_are_those_of_transformers(buckets, two_way):
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-3 * buckets.reach, 3 * buckets.reach + 1)
    wanted = T5Attention._relative_position_bucket(distances, two_way, buckets.count, buckets.reach)
    inside = distances.clamp(-buckets.reach, buckets.reach) + buckets.reach
    assert torch.equal(buckets_by_distance(buckets, two_way)[inside], wanted)


@pytest.mark.parametrize("is_causal", [False, True])
def test_layers_of_a_rank_share_the_table_of_its_heads(is_causal):
    spec = AttentionSpec(64, 4, 4, 16, buckets=Buckets(8, 10), is_causal=is_causal)

    def make(builder):
        return [distance_bias(builder, spec, "bias", range(2, 4)) for _ in range(2)]

    (table, other), tensors = build_layer(make)
    assert other is table
    bucket_of = buckets_by_distance(Buckets(8, 10), not is_causal)
    assert torch.equal(table, tensors["bias.weight"][bucket_of, 2:].T)
    assert table.is_contiguous()
