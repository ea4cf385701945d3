"""kv_cache_layout: blocks whose entries lie together, and blocks that are stored layer by layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.config.declaration import ConfigError
from quire.messages.transfers import Peer, Transfer
from quire.transfer.server import BlockServer
from quire.transfer.store import PeerStore
from quire.worker.kv_memory import KVMemory
from quire.worker.kv_transfer import WHOLE, HostRows
from support.kv_peers import GQA, NAME, SECRET, WINDOWS, check, fill

CPU = torch.device("cpu")
BYTES, PARTS = 256, 4


def both(num_blocks: int = 6) -> list[KVMemory]:
    """A cache of each layout, with the same blocks."""
    memories = [KVMemory(num_blocks, BYTES, CPU, parts=parts) for parts in (1, PARTS)]
    data = np.random.default_rng(0).integers(0, 256, (num_blocks - 1, BYTES), np.uint8)
    for memory in memories:
        memory.write(range(1, num_blocks), data)
    return memories


def flat(memory: KVMemory) -> Tensor:
    return memory.blocks.flatten(1)


def test_entries_of_a_layer_lie_side_by_side() -> None:
    together, divided = both()
    assert divided.blocks.shape == (6, PARTS, BYTES // PARTS)
    entry = divided.blocks[:, 2]
    assert entry.is_contiguous()
    assert torch.equal(entry, together.blocks[:, 2 * BYTES // PARTS : 3 * BYTES // PARTS])


def test_blocks_have_the_same_bytes_in_both_layouts() -> None:
    together, divided = both()
    for memory in (together, divided):
        memory.copy_blocks([1, 2, 3], [4, 1, 5])
    assert torch.equal(flat(together), flat(divided))
    assert np.array_equal(together.read([5, 1]), divided.read([5, 1]))
    with pytest.raises(ValueError, match="2 blocks of 256 bytes cannot be filled"):
        divided.write([1, 2], bytes(100))


@pytest.mark.parametrize("span", [WHOLE, slice(64, 128), slice(10, 200), slice(0, 64), slice(65, 66), slice(192, None)])
def test_spans_of_blocks_are_copied_in_both_layouts(span: slice) -> None:
    together, divided = both()
    rows = HostRows(divided.blocks)
    assert rows.block_bytes == BYTES
    targets = torch.zeros(2, BYTES, dtype=torch.uint8)
    rows.read([3, 1], list(targets), span)
    expected = torch.zeros(2, BYTES, dtype=torch.uint8)
    expected[:, span] = together.blocks[[3, 1]][:, span]
    assert torch.equal(targets, expected)
    rows.write([5, 2], list(targets), span)
    together.blocks[[5, 2], span] = targets[:, span]
    assert torch.equal(flat(divided), flat(together))


@pytest.mark.parametrize("model", [GQA, WINDOWS], ids=["one group", "two groups"])
@pytest.mark.parametrize(("producer_parts", "consumer_parts"), [(True, False), (False, True), (True, True)])
def test_engines_with_different_layouts_exchange_blocks(model, producer_parts: bool, consumer_parts: bool) -> None:
    (layout,) = model.layouts(1, 1)
    entries = max(len(group.entries) for group in layout.groups)
    sizes = [entries if is_divided else 1 for is_divided in (producer_parts, consumer_parts)]
    theirs, own = (KVMemory(12, layout.block_bytes, CPU, parts=parts) for parts in sizes)
    group_of = {block: block % len(layout.groups) for block in range(1, 12)}
    data = np.zeros((12, layout.block_bytes), np.uint8)
    fill(data, layout, group_of)
    theirs.write(range(1, 12), data[1:])
    server = BlockServer(HostRows(theirs.blocks), layout, SECRET, "127.0.0.1", 0, name=NAME)
    store = PeerStore(layout, 0, SECRET)
    try:
        slots, ids = [3, 8, 5, 10], [1, 2, 11, 7]
        keys = [(group_of[slot], b"%d" % slot) for slot in slots]
        order = Transfer(1, 0, True, ids, keys, slots, Peer(NAME, "127.0.0.1", (server.port,)))
        assert store.load(HostRows(own.blocks), order) == []
        check(own.blocks.flatten(1).numpy(), layout, order)
    finally:
        store.close()
        server.close()


PROMPTS = ["The first prompt has some words in it", "and a second one", "The first prompt has another end"]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_both_layouts_give_the_same_tokens(backend: str) -> None:
    results = []
    for layout in ("layers_together", "layer_by_layer"):
        llm = LLM(
            kv_cache_layout=layout,
            attention_backend=backend,
            max_model_len=256,
            max_num_seqs=2,
            num_gpu_blocks_override=24,  # blocks are evicted, and loaded again
            kv_offloading_size=0.01,
        )
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        results.append([[x.outputs[0].token_ids for x in llm.generate(PROMPTS, params, use_tqdm=False)] for _ in "ab"])
        llm.shutdown()
    assert results[0] == results[1]


def test_compression_needs_layers_together() -> None:
    with pytest.raises(ConfigError, match="layer_by_layer"):
        LLM(kv_cache_layout="layer_by_layer", kv_compression={"method": "kv_compress", "ratio": 4})


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_layout"):
        LLM(kv_cache_layout="by_head")
