"""What a group of layers keeps, and how many blocks that can be."""

from __future__ import annotations

import pytest

from quire.kvcache.specs import KVCacheSpec, group_layers


def test_layers_with_the_same_window_share_a_group_full_attention_first() -> None:
    assert group_layers([512, None, 512, None, 128], 4096) == [
        KVCacheSpec((1, 3)),
        KVCacheSpec((4,), 128),
        KVCacheSpec((0, 2), 512),
    ]
    assert group_layers([None, None], 4096) == [KVCacheSpec((0, 1))]


def every(nth: int, layers: int, window: int) -> list[int | None]:
    """Full attention in every nth layer, a window in the others."""
    return [None if (layer + 1) % nth == 0 else window for layer in range(layers)]


@pytest.mark.parametrize(
    ("windows", "longest"),
    [
        pytest.param(every(6, 62, 1024), 131_072, id="Gemma-3-27B"),
        pytest.param(every(4, 64, 4096), 65_536, id="OLMo-3-32B"),
        pytest.param(every(4, 32, 4096), 131_072, id="Command-R7B"),
        pytest.param(every(2, 36, 128), 131_072, id="gpt-oss-120b"),
    ],
)
def test_a_long_request_takes_little_more_memory_than_what_must_be_kept(
    windows: list[int | None], longest: int
) -> None:
    specs = group_layers(windows, longest)
    assert sorted(layer for spec in specs for layer in spec.layers) == list(range(len(windows)))
    block_size, chunk, layers_of_a_block = 16, 2048, max(len(spec.layers) for spec in specs)
    taken = sum(spec.max_blocks(longest, chunk, block_size) for spec in specs) * block_size * layers_of_a_block
    needed = sum(min(window or longest, longest) for window in windows)
    assert needed >= 0.9 * taken
    assert len(specs) <= 8


def test_full_attention_needs_every_token() -> None:
    assert KVCacheSpec((0,)).first_needed_token(1000) == 0


def test_a_window_counts_the_query_itself() -> None:
    spec = KVCacheSpec((0,), window=4)
    assert [spec.first_needed_token(position) for position in (0, 3, 4, 10)] == [0, 0, 1, 7]
    assert KVCacheSpec((0,), window=1).first_needed_token(10) == 10


def test_full_attention_holds_a_block_for_every_begun_block_of_tokens() -> None:
    spec = KVCacheSpec((0,))
    assert [spec.max_blocks(length, 8, 4) for length in (1, 4, 5, 100)] == [1, 1, 2, 25]


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 11])
@pytest.mark.parametrize("chunk", [1, 3, 4, 9])
def test_a_window_never_spans_more_than_max_blocks(window: int, chunk: int) -> None:
    spec, block_size = KVCacheSpec((0,), window), 4
    for length in range(1, 60):
        spans = []
        for retired in range(length):
            first = spec.first_needed_token(retired) // block_size
            last = (min(retired + chunk, length) - 1) // block_size
            spans.append(last - first + 1)
        most = spec.max_blocks(length, chunk, block_size)
        assert max(spans) <= most <= max(spans) + 1
