"""Prefixes that are pinned in the cache: kept while there is need for their blocks, within bounds, and given back."""

from __future__ import annotations

import pytest

from quire.kv.hashing import extra_keys
from quire.kv.manager import KVCacheManager
from quire.kv.specs import attention_spec
from quire.messages.changes import PinPrefix
from quire.messages.engine import EngineCoreRequest
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import BlockTableEdits
from quire.scheduler.pins import PinnedPrefixes
from quire.scheduler.request import Request

SIZE = 4
FULL = [attention_spec([0])]
MIXED = [attention_spec([0]), attention_spec([1], window=6)]
SYSTEM = list(range(100, 113))  # three full blocks, and a token


def compute(kv: KVCacheManager, tokens: list[int], salt: str | None = None) -> int:
    """A request that computes its tokens and ends. Returns how many it found."""
    source = EngineCoreRequest("r", tokens, SamplingParams(), 0, 16)
    request = Request(source, (0, 0.0, 0), extra_keys(SIZE, salt))
    found = kv.admit(request)
    assert found is not None
    request.num_computed_tokens = request.num_retired_tokens = found
    assert kv.allocate(request, len(tokens), BlockTableEdits())
    request.num_computed_tokens = len(tokens)
    kv.hash_full_blocks(request)
    kv.free(request)
    return found


def fill(kv: KVCacheManager) -> None:
    """Other texts, which need every free block."""
    for text in range(40):
        compute(kv, [text * 50 + i for i in range(24)])


@pytest.mark.parametrize("specs", [FULL, MIXED])
def test_a_pinned_prefix_is_found_after_others_have_used_all_blocks(specs):
    kv = KVCacheManager(40, specs, SIZE, 64)
    pins = PinnedPrefixes(kv, 20)
    compute(kv, SYSTEM)
    pins.pin(PinPrefix("p", SYSTEM))
    compute(kv, list(range(500, 513)))
    fill(kv)
    assert compute(kv, [*SYSTEM[:12], 7, 7, 7]) == 12
    assert compute(kv, [*range(500, 512), 7, 7, 7]) == 0
    pins.unpin("p")
    fill(kv)
    assert compute(kv, [*SYSTEM[:12], 7, 7, 7]) == 0
    assert kv.pool.num_free == kv.pool.num_usable


def test_blocks_that_prefixes_share_count_once_and_no_more_than_allowed_are_held():
    kv = KVCacheManager(40, FULL, SIZE, 64)
    pins = PinnedPrefixes(kv, 4)
    compute(kv, SYSTEM)
    compute(kv, [*SYSTEM[:12], 7, 8, 9, 10])
    compute(kv, [5] * 8)
    pins.pin(PinPrefix("a", SYSTEM))
    pins.pin(PinPrefix("b", [*SYSTEM[:12], 7, 8, 9, 10]))
    assert kv.pool.num_usable - kv.pool.num_free == 4
    with pytest.raises(ValueError, match="would take 6 blocks of the cache, and may take 4;"):
        pins.pin(PinPrefix("c", [5] * 8))
    pins.pin(PinPrefix("a", SYSTEM))  # once more, by a client that does not know
    pins.unpin("b")
    pins.unpin("unknown")
    assert kv.pool.num_usable - kv.pool.num_free == 3
    pins.clear()
    assert kv.pool.num_free == kv.pool.num_usable


def test_what_cannot_be_pinned_is_refused_and_nothing_is_held():
    kv = KVCacheManager(40, FULL, SIZE, 64)
    pins = PinnedPrefixes(kv, 20)
    with pytest.raises(ValueError, match="shorter than a block"):
        pins.pin(PinPrefix("p", [1, 2, 3]))
    with pytest.raises(ValueError, match="try again"):
        pins.pin(PinPrefix("p", SYSTEM))  # it was not computed
    compute(kv, SYSTEM, salt="a")
    with pytest.raises(ValueError, match="try again"):
        pins.pin(PinPrefix("p", SYSTEM, "b"))
    pins.pin(PinPrefix("p", SYSTEM, "a"))
    pins.clear()
    assert kv.pool.num_free == kv.pool.num_usable
    off = PinnedPrefixes(KVCacheManager(40, FULL, SIZE, 64, enable_prefix_caching=False), 20)
    with pytest.raises(ValueError, match="enable_prefix_caching"):
        off.pin(PinPrefix("p", SYSTEM))
