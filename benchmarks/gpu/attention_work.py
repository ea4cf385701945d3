"""The work items of a step's attention, as plan_kernel (quire/ops/triton/attention_work.py) computes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """A part of the keys of a tile. first: the tile's first token in its request's part of the step. begin, end: key
    tiles. is_divided: whether the tile has other items."""

    request: int
    first: int
    begin: int
    end: int
    is_divided: bool


def plan_items(
    counts: Sequence[int], lengths: Sequence[int], tokens: int, keys: int, parts: int, fewest: int, most: int
) -> list[Item]:
    """Return the items, tile by tile. counts: each request's tokens in the step. lengths: after it. See plan_kernel for
    the other arguments."""
    tiles = []
    for request, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for first in range(0, count, tokens):
            needed = math.ceil(min(length, length - count + first + tokens) / keys)
            tiles.append((request, first, max(1, needed)))
    share = max(math.ceil(sum(needed for _, _, needed in tiles) / parts), fewest)
    items = []
    for request, first, needed in tiles:
        count = min(math.ceil(needed / share), most)
        each = math.ceil(needed / count)
        for begin in range(0, needed, each):
            items.append(Item(request, first, begin, min(begin + each, needed), each < needed))
    return items
