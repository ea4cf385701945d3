"""What a group of layers keeps, and how many blocks that can be."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from quire.kv.specs import (
    CacheEntry,
    CrossAttentionSpec,
    KVCacheSize,
    KVCacheSpec,
    LatentSpec,
    attention_spec,
    group_entries,
)

BLOCK_SIZE = 16


def kept_by(windows: list[int | None]) -> list[KVCacheSpec]:
    """What a model's layers keep, windows[i] being layer i's."""
    return [attention_spec([layer], window) for layer, window in enumerate(windows)]


def test_layers_with_the_same_window_share_a_group_those_that_keep_most_first() -> None:
    assert group_entries(kept_by([512, None, 512, None, 128]), 4096) == [
        attention_spec([1, 3]),
        attention_spec([0, 2], 512),
        attention_spec([4], 128),
    ]
    assert group_entries(kept_by([None, None]), 4096) == [attention_spec([0, 1])]


def test_a_layer_may_keep_entries_in_several_roles() -> None:
    kept = [LatentSpec((CacheEntry(layer), CacheEntry(layer, "indexer"))) for layer in range(3)]
    (group,) = group_entries(kept, 4096)
    assert group.layers == (0, 1, 2)
    assert [(e.layer, e.role) for e in group.entries] == [(i, role) for i in range(3) for role in ("kv", "indexer")]
    assert group.starts({"kv": 100, "indexer": 30}.__getitem__) == [0, 100, 130, 230, 260, 360, 390]
    assert group.page_bytes(lambda role: 100) == 600


def test_cross_attention_has_a_group_whose_tables_do_not_grow() -> None:
    kept = [*kept_by([None, None]), *(CrossAttentionSpec((CacheEntry(layer, "cross"),), 1500) for layer in range(2))]
    cross, own = group_entries(kept, 448)
    assert own == attention_spec([0, 1])
    assert cross.entries == (CacheEntry(0, "cross"), CacheEntry(1, "cross"))
    assert cross.layers == (0, 1)
    assert not cross.new_blocks(0, 5, BLOCK_SIZE)
    assert not cross.new_blocks(94, 448, BLOCK_SIZE)
    assert cross.max_blocks(1, 1, BLOCK_SIZE) == cross.max_blocks(448, 448, BLOCK_SIZE) == 94
    assert cross.tokens_kept(448) == 1500
    assert list(cross.full_blocks(0, 448, BLOCK_SIZE)) == []


def test_a_cache_with_groups_of_all_kinds_travels_as_data() -> None:
    cross = CrossAttentionSpec((CacheEntry(0, "cross"),), 1500)
    specs = (attention_spec([0]), attention_spec([1, 2], 64), LatentSpec((CacheEntry(3, "indexer"),)), cross)
    size = KVCacheSize(100, (4096,), specs, "cpu, bfloat16", 16)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(size), type=KVCacheSize) == size


def every(nth: int, layers: int, window: int) -> list[int | None]:
    """Full attention in every nth layer, a window in the others."""
    return [None if (layer + 1) % nth == 0 else window for layer in range(layers)]


def fitting_tokens(specs: Sequence[KVCacheSpec], size: int, longest: int, entry_bytes: int) -> float:
    """Tokens, in requests of the full length, that fit into `size` bytes of cache."""
    num_blocks = size / max(spec.page_bytes(lambda role: entry_bytes) for spec in specs)
    return longest * num_blocks / sum(spec.max_blocks(longest, 2048, BLOCK_SIZE) for spec in specs)


@pytest.mark.parametrize(
    ("windows", "longest", "token_bytes", "gain"),
    [
        pytest.param(every(6, 62, 1024), 131_072, 2 * 16 * 128 * 2, 4, id="Gemma-3-27B"),
        pytest.param(every(4, 64, 4096), 65_536, 2 * 8 * 128 * 2, 2, id="OLMo-3-32B"),
        pytest.param(every(4, 32, 4096), 131_072, 2 * 8 * 128 * 2, 2, id="Command-R7B"),
        pytest.param(every(2, 36, 128), 131_072, 2 * 8 * 64 * 2, 1, id="gpt-oss-120b"),
    ],
)
def test_nine_tenths_of_the_memory_hold_what_must_be_kept(
    windows: list[int | None], longest: int, token_bytes: int, gain: float
) -> None:
    """token_bytes: of an entry. gain: over the groups of the first edition, which had one for each kind of layer."""
    specs = group_entries(kept_by(windows), longest)
    assert sorted(layer for spec in specs for layer in spec.layers) == list(range(len(windows)))
    kinds = {window: [i for i, other in enumerate(windows) if other == window] for window in windows}
    size, entry_bytes = 64 << 30, token_bytes * BLOCK_SIZE
    before = fitting_tokens([attention_spec(kinds[w], w) for w in kinds], size, longest, entry_bytes)
    after = fitting_tokens(specs, size, longest, entry_bytes)
    most = size / sum(min(window or longest, longest) * token_bytes for window in windows) * longest
    print(f"tokens in 64 GiB: {before:,.0f} before, {after:,.0f} now, {most:,.0f} at most; {len(specs)} groups")
    assert most >= after >= 0.9 * most
    assert after >= gain * before
    assert len(specs) <= 8


def test_a_slot_is_the_place_in_a_block_of_the_requests_table() -> None:
    tables = np.array([[4, 6], [8, 0]], np.int32)  # [rows, indices]
    rows, positions = np.array([0, 0, 1]), np.array([3, 4, 1])
    assert attention_spec([0]).slots(tables, rows, positions, 4).tolist() == [19, 24, 33]


def test_full_attention_needs_every_token() -> None:
    assert attention_spec([0]).first_needed_token(1000) == 0


def test_a_window_counts_the_query_itself() -> None:
    spec = attention_spec([0], window=4)
    assert [spec.first_needed_token(position) for position in (0, 3, 4, 10)] == [0, 0, 1, 7]
    assert attention_spec([0], window=1).first_needed_token(10) == 10


def test_full_attention_holds_a_block_for_every_begun_block_of_tokens() -> None:
    spec = attention_spec([0])
    assert [spec.max_blocks(length, 8, 4) for length in (1, 4, 5, 100)] == [1, 1, 2, 25]


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 11])
@pytest.mark.parametrize("chunk", [1, 3, 4, 9])
def test_a_window_never_spans_more_than_max_blocks(window: int, chunk: int) -> None:
    spec, block_size = attention_spec([0], window), 4
    for length in range(1, 60):
        spans = []
        for retired in range(length):
            first = spec.first_needed_token(retired) // block_size
            last = (min(retired + chunk, length) - 1) // block_size
            spans.append(last - first + 1)
        most = spec.max_blocks(length, chunk, block_size)
        assert max(spans) <= most <= max(spans) + 1
