"""Ranks of engines that exchange KV blocks, without the engines: layouts of models, and blocks whose bytes say what
they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import ENTRY_ALIGNMENT, AttentionBackend, AttentionShape
from quire.attention.reference import ReferenceAttention
from quire.attention.sparse import SparseAttention
from quire.cluster.secret import ClusterSecret
from quire.kv.specs import group_entries
from quire.layers.attention_spec import AttentionSpec, IndexerSpec, LatentAttentionSpec
from quire.layers.specs import NormSpec
from quire.messages.transfers import Peer, Transfer
from quire.parallel.mesh import Communicator
from quire.transfer.layout import RankLayout, rank_layout
from quire.transfer.server import BlockServer
from quire.transfer.store import PeerStore
from quire.worker.kv_memory import KVMemory
from quire.worker.kv_transfer import WHOLE, Rows, moment
from quire.worker.step_clock import StepClock

SECRET, NAME = ClusterSecret(b"s" * 32), "producer-1"


@dataclass(frozen=True)
class ModelModel:
    """What matters of a model. kv_heads: 0 for latents. index_dim: of the keys of indexers, which every layer has, or
    with shares_selections every second one; 0 for none."""

    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 8
    windows: tuple[int | None, ...] = (None,)
    block_size: int = 4
    index_dim: int = 0
    shares_selections: bool = False

    def layouts(self, tp: int, pp: int) -> list[RankLayout]:
        """The layout of each rank."""
        return [self.layout(rank % tp, tp, rank // tp, pp) for rank in range(tp * pp)]

    def layout(self, rank: int, tp: int, stage: int, pp: int) -> RankLayout:
        group = Communicator(rank, tp)
        windows = [self.windows[layer % len(self.windows)] for layer in range(self.layers)]
        mixers = [self._mixer(layer) for layer in range(self.layers)]
        shapes = [mixer.cache_shape(group) for mixer in mixers]
        kept = [mixer.kv_spec(layer, window) for layer, (mixer, window) in enumerate(zip(mixers, windows, strict=True))]
        specs = group_entries(kept, 64, shapes)
        own = range(self.layers * stage // pp, self.layers * (stage + 1) // pp)
        specs = [spec.of_layers(own) for spec in specs]
        shape = AttentionShape(
            shapes[0].num_heads,
            shapes[0].num_kv_heads,
            shapes[0].head_dim,
            self.block_size,
            torch.float32,
            torch.device("cpu"),
            shapes[0].value_dim,
        )
        backend: AttentionBackend = ReferenceAttention(shape)
        if self.index_dim:
            backend = SparseAttention(shape, 16, self.index_dim, ReferenceAttention)
        pages = (spec.page_bytes(backend.entry_bytes) for spec in specs)
        return rank_layout(mixers, group, specs, [backend] * len(specs), max(*pages, 64))

    def _mixer(self, layer: int) -> AttentionSpec | LatentAttentionSpec:
        if self.kv_heads:
            return AttentionSpec(self.heads * self.head_dim, self.heads, self.kv_heads, self.head_dim)
        norm = NormSpec(12, 1e-6)
        if not self.index_dim:
            return LatentAttentionSpec(32, self.heads, None, 12, 8, 4, 8, norm, 1.0)
        indexer = IndexerSpec(2, self.index_dim, 16)
        shares = self.shares_selections and layer % 2 == 1
        return LatentAttentionSpec(32, self.heads, 16, 12, 8, 4, 8, norm, 1.0, indexer=indexer, shares_selection=shares)


GQA, LATENTS, WINDOWS = ModelModel(), ModelModel(kv_heads=0), ModelModel(layers=8, windows=(8, None))
NUM_BLOCKS = 16  # of a consumer


def content(group: int, layer: int, head: str, block: object, size: int) -> bytes:
    """What a block has at a head of a layer."""
    return random.Random(f"{group} {layer} {head} {block}").randbytes(size)


def heads(layout: RankLayout) -> Iterator[tuple[int, int, str, int, int]]:
    """Group, layer, role and number of the head, offset and size of all heads that a rank keeps, counted independently
    of quire.transfer."""
    for group, part in enumerate(layout.groups):
        start = 0
        for entry in part.entries:
            size = entry.head_bytes
            for place in range(entry.num_heads):
                yield group, entry.layer, f"{entry.role} {entry.first_head + place}", start + place * size, size
            start += -(-entry.num_heads * size // ENTRY_ALIGNMENT) * ENTRY_ALIGNMENT


def fill(blocks: np.ndarray, layout: RankLayout, group_of: dict[int, int], only: int | None = None) -> None:
    """Write into each block of a producer's rank what a rank would have there, of one layer or of all. group_of: the KV
    group of each block."""
    for block, own_group in group_of.items():
        for group, layer, head, offset, size in heads(layout):
            if group == own_group and only in (None, layer):
                blocks[block, offset : offset + size] = np.frombuffer(
                    content(group, layer, head, block, size), np.uint8
                )


def check(blocks: np.ndarray, layout: RankLayout, order: Transfer, untouched: int = 0) -> None:
    """Compare a consumer's blocks with what they must have."""
    for block, slot, (own_group, _) in zip(order.block_ids, order.slots, order.keys, strict=True):
        for group, layer, head, offset, size in heads(layout):
            if group == own_group:
                assert bytes(blocks[block, offset : offset + size]) == content(group, layer, head, slot, size)
    others = np.setdiff1d(np.arange(len(blocks)), order.block_ids)
    assert (blocks[others] == untouched).all()


class Producer:
    """The servers of an engine's ranks. Block b from 1 to num_blocks - 1 belongs to KV group b % (number of groups).

    clocks: of the ranks, if they compute the blocks in steps.
    """

    def __init__(
        self,
        layouts: Sequence[RankLayout],
        num_blocks: int = 12,
        rows: type[Rows] | None = None,
        shared: bool = False,
        computes: bool = False,
        **options: object,
    ) -> None:
        """computes: whether the blocks are still to be computed, layer by layer, with `compute`."""
        self.layouts, self.servers, self.clocks = layouts, list[BlockServer](), list[StepClock]()
        self.memories = []
        self.group_of = {block: block % len(layouts[0].groups) for block in range(1, num_blocks)}
        for layout in layouts:
            memory = KVMemory(num_blocks, layout.block_bytes, torch.device("cpu"), shared)
            self.memories.append(memory)
            made = (rows or Rows.of)(memory.blocks)  # type: ignore[operator]
            settings = {"name": NAME, "handle": memory.handle, **options}
            if computes:
                layers = [layer for _, layer, *_ in heads(layout)]
                self.clocks.append(StepClock(range(min(layers), max(layers) + 1), partial(moment, torch.device("cpu"))))
                settings["clock"] = self.clocks[-1]
            else:
                fill(memory.blocks.numpy(), layout, self.group_of)
            self.servers.append(BlockServer(made, layout, SECRET, "127.0.0.1", 0, **settings))  # type: ignore[arg-type]
        self.peer = Peer(NAME, "127.0.0.1", tuple(server.port for server in self.servers))

    def order(self, seed: int = 0, count: int = 7, num_blocks: int = 16) -> Transfer:
        """Load some of the blocks into others."""
        dice = random.Random(seed)
        slots = dice.sample(sorted(self.group_of), count)
        keys = [(self.group_of[slot], b"%d" % slot) for slot in slots]
        ids, step = dice.sample(range(1, num_blocks), count), 5 if self.clocks else 0
        return Transfer(1, 0, True, ids, keys, slots, self.peer, step)

    def compute(self, layer: int) -> None:
        """One layer of a step that has begun."""
        for layout, memory, clock in zip(self.layouts, self.memories, self.clocks, strict=True):
            if any(layer == number for _, number, *_ in heads(layout)):
                fill(memory.blocks.numpy(), layout, self.group_of, layer)
                clock.layer_done()

    def close(self) -> None:
        for server in self.servers:
            server.close()


class CopiedRows(Rows):
    """Rows that CPU code cannot reach directly, like those of a GPU."""

    def pin(self, memory: Tensor) -> None: ...

    def read(self, block_ids: Sequence[int], targets: Sequence[Tensor], span: slice = WHOLE) -> None:
        for block_id, target in zip(block_ids, targets, strict=True):
            target[span] = self.blocks[block_id, span]

    def write(self, block_ids: Sequence[int], sources: Sequence[Tensor], span: slice = WHOLE) -> None:
        for block_id, source in zip(block_ids, sources, strict=True):
            self.blocks[block_id, span] = source[span]


class Consumer:
    """The ranks of an engine that read."""

    def __init__(self, layouts: Sequence[RankLayout], rows: type[Rows] | None = None, **options: object) -> None:
        self.layouts = layouts
        self.blocks = [torch.zeros(NUM_BLOCKS, layout.block_bytes, dtype=torch.uint8) for layout in layouts]
        self.rows = [(rows or Rows.of)(blocks) for blocks in self.blocks]  # type: ignore[operator]
        secret = options.pop("secret", SECRET)
        self.stores = [
            PeerStore(layout, rank, secret, **options)
            for rank, layout in enumerate(layouts)  # type: ignore[arg-type]
        ]

    def load(self, order: Transfer) -> list[list[int]]:
        """Each rank's failures."""
        return [store.load(rows, order) for store, rows in zip(self.stores, self.rows, strict=True)]

    def check(self, order: Transfer) -> None:
        for layout, blocks in zip(self.layouts, self.blocks, strict=True):
            check(blocks.numpy(), layout, order)

    def close(self) -> None:
        for store in self.stores:
            store.close()


Make = Callable[..., tuple[Producer, Consumer]]
