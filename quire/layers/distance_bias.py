"""Biases on attention scores by the distance between query and key: learned ones, and roots of distances."""

from math import log

import torch
from torch import Tensor

from quire.layers.alibi import alibi_slopes
from quire.layers.attention_spec import AttentionSpec, Buckets
from quire.layers.build import Builder


def distance_bias(builder: Builder, spec: AttentionSpec, name: str, heads: range) -> Tensor:
    """Return the biases of a rank's heads by distance, for AttentionBackend.attend: [heads, 2 * reach + 1], float32.

    The checkpoint has one bias for each bucket of distances (T5; arXiv:1910.10683, section 2.1): [buckets, heads]. The
    table is built when these are loaded, and layers with the same `name` share it.
    """
    assert spec.buckets is not None
    if name not in builder.shared:
        count = spec.buckets.count
        bucket_of = buckets_by_distance(spec.buckets, two_way=not spec.is_causal)
        weight = builder.parameter(count, len(heads), dtype=torch.float32)
        table = builder.parameter(len(heads), len(bucket_of), dtype=torch.float32)
        builder.part(f"{name}.weight", weight, (count, spec.num_heads), slice(None), slice(heads.start, heads.stop))
        builder.when_loaded(lambda: table.copy_(weight[bucket_of.to(weight.device)].T))  # type: ignore[arg-type]
        builder.shared[name] = table
    found: Tensor = builder.shared[name]
    return found


def root_bias(builder: Builder, spec: AttentionSpec, heads: range) -> Tensor:
    """Return the biases of a rank's heads by distance: -slope * sqrt(distance) with the slopes of ALiBi (Step 1).
    Layers share the table: [heads, 2 * reach + 1], float32. Its second half is not used."""
    name = f"the roots of {spec.root_reach} distances"
    if name not in builder.shared:
        slopes = torch.tensor(alibi_slopes(spec.num_heads)[heads.start : heads.stop], device=builder.device)
        reach = torch.arange(-spec.root_reach, spec.root_reach + 1, device=builder.device)
        builder.shared[name] = -slopes[:, None] * reach.abs().float().sqrt()
    found: Tensor = builder.shared[name]
    return found


def buckets_by_distance(buckets: Buckets, two_way: bool) -> Tensor:
    """Return the bucket of each distance from -reach to reach, negative for keys before the query: [2 * reach + 1].

    two_way: keys after the query have half of the buckets. Otherwise they are in the first bucket, which no query uses.
    In each direction, the first half of the buckets contains one distance each, and the sizes of the others grow by a
    constant factor.
    """
    ahead = torch.arange(-buckets.reach, buckets.reach + 1)
    distance = (-ahead).clamp(min=0)
    count = buckets.count
    first = torch.zeros_like(ahead)
    if two_way:
        distance = ahead.abs()
        count = buckets.count // 2
        first = torch.where(ahead > 0, count, 0)
    single = count // 2
    # In float32 and in this order, as in training: rounding decides the bucket of a distance at a border.
    wide = torch.log(distance.float() / single) / log(buckets.reach / single) * (count - single)
    return first + torch.where(distance < single, distance, (single + wide.long()).clamp(max=count - 1))
