"""Which bytes of other ranks' blocks fill a rank's own: for all pairs of mesh sizes, against blocks that say what they
are."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from quire.messages.transfers import Transfer
from quire.transfer.layout import Entry, GroupLayout, RankLayout, plan
from support.kv_peers import ModelModel, check, content, fill, heads

MODELS = {
    "kv heads": ModelModel(),
    "few kv heads": ModelModel(kv_heads=2),
    "uneven heads": ModelModel(layers=3, heads=6, kv_heads=3),
    "padded entries": ModelModel(head_dim=5, block_size=3),
    "latents": ModelModel(kv_heads=0),
    "indexers": ModelModel(kv_heads=0, index_dim=6),
    "shared selections": ModelModel(layers=5, kv_heads=0, index_dim=6, block_size=5, shares_selections=True),
    "windows": ModelModel(layers=8, windows=(8, 8, None)),
}
SIZES = list(itertools.product((1, 2, 4), (1, 2)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(SIZES, SIZES)))
def test_the_planned_runs_fill_every_head(model: ModelModel, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    producers, consumers = model.layouts(*theirs), model.layouts(*ours)
    groups = range(len(producers[0].groups))
    blocks = []
    for layout in producers:
        blocks.append(np.zeros((len(groups) + 1, layout.block_bytes), np.uint8))
        fill(blocks[-1], layout, {1 + group: group for group in groups})
    for rank, own in enumerate(consumers):
        mine = np.zeros((len(groups) + 1, own.block_bytes), np.uint8)
        for group, reads in enumerate(plan(own, producers, rank)):
            for number, runs in reads.items():
                for remote, start, length in runs:
                    assert remote + length <= producers[number].block_bytes
                    mine[1 + group, start : start + length] = blocks[number][1 + group, remote : remote + length]
        everything = [1 + group for group in groups]
        check(mine, own, Transfer(1, 0, True, everything, [(group, b"") for group in groups], everything))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("tp", "pp"), SIZES)
def test_equal_layouts_need_one_run_for_each_group(model: ModelModel, tp: int, pp: int) -> None:
    layouts = model.layouts(tp, pp)
    for rank, own in enumerate(layouts):
        for group, reads in zip(own.groups, plan(own, layouts, rank), strict=True):
            if group.entries:
                assert list(reads.values()) == [[(0, 0, group.entries[-1].stop)]]
            else:
                assert not reads


def test_ranks_that_need_the_same_heads_read_them_from_different_ranks() -> None:
    for model in (MODELS["latents"], MODELS["few kv heads"]):
        layouts = model.layouts(4, 1)
        read_from = [list(plan(own, layouts, rank)[0]) for rank, own in enumerate(layouts)]
        assert read_from == [[0], [1], [2], [3]]


def test_what_does_not_fit_is_named() -> None:
    own, other = MODELS["kv heads"].layout(0, 1, 0, 1), MODELS["kv heads"].layouts(2, 2)
    with pytest.raises(ValueError, match=r"no rank of the other engine has layer 2, KV head 0 in its KV group 0"):
        plan(own, other[:2], 0)
    with pytest.raises(ValueError, match=r"layer 0 has 256 bytes for each KV head here .* and 512 there"):
        plan(own, ModelModel(head_dim=16).layouts(1, 1), 0)
    with pytest.raises(ValueError, match="different numbers of KV groups: 1 here, 4 there"):
        plan(own, MODELS["windows"].layouts(1, 1), 0)


def test_a_layout_whose_entries_are_outside_its_blocks_is_refused() -> None:
    for start, head_bytes in ((-8, 8), (0, 0), (52, 8)):
        with pytest.raises(ValueError, match="fit into 64 bytes"):
            RankLayout(64, (GroupLayout("f", (Entry(0, "kv", 0, 2, start, head_bytes),)),))


def test_a_layout_survives_the_wire() -> None:
    layout = MODELS["windows"].layout(1, 2, 1, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=RankLayout) == layout
    assert len({content(*place[:3], 1, 8) for place in heads(layout)}) == len(list(heads(layout)))
