"""Compressed attention (DeepSeek-V4) as data. layers/compressed_attention.py computes it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.kv.specs import (
    CacheEntry,
    EntriesShape,
    LatentSpec,
    ModelKVSpec,
    RowsShape,
    SlidingWindowSpec,
    attention_spec,
)
from quire.layers.attention_spec import CacheShape, IndexerSpec, share_of
from quire.layers.rotary_spec import RotarySpec
from quire.layers.specs import NormSpec

if TYPE_CHECKING:
    from quire.parallel.mesh import Communicator


@dataclass(frozen=True)
class CompressedEntriesSpec:
    """What a layer caches of the whole text: one entry for each `rate` tokens. indexer: None if queries attend to all
    entries. overlaps: an entry is also made of the tokens of the entry before it."""

    rate: int
    num_heads: int
    head_dim: int
    indexer: IndexerSpec | None = None

    @property
    def overlaps(self) -> bool:
        return self.indexer is not None

    @property
    def span(self) -> int:
        """The tokens of which an entry is made."""
        return self.rate * (1 + self.overlaps)

    def cache_shape(self, group: "Communicator") -> CacheShape:
        heads, _ = share_of(self.num_heads, group.rank, group.size)
        index = self.indexer
        entries = EntriesShape(self.rate, index.top_k if index else None, index.head_dim if index else 0)
        return CacheShape(len(heads), 1, self.head_dim, self.head_dim, entries=entries)

    def kv_spec(self, layer: int, window: int | None) -> ModelKVSpec:
        roles = ("entries", "entry_keys")[: 1 + (self.indexer is not None)]
        return LatentSpec(tuple(CacheEntry(layer, role) for role in roles))


@dataclass(frozen=True)
class CompressorInputsSpec:
    """The projections of each token from which entries are made, until the entries are complete."""

    num_heads: int
    span: int
    size: int

    def cache_shape(self, group: "Communicator") -> RowsShape:
        return RowsShape(self.size)

    def kv_spec(self, layer: int, window: int | None) -> ModelKVSpec:
        return SlidingWindowSpec((CacheEntry(layer, "inputs"),), self.span)


@dataclass(frozen=True)
class CompressedAttentionSpec:
    """Attention to the last tokens, whose one vector is key and value, and to compressed entries of the text.

    rope_dim: the last elements of a head, which are rotated. rotary: the rotation of entries. output_groups: the heads
    in a group share the first product after attention, whose results have output_rank elements. entries: None for a
    layer that attends to the last tokens only. norm: of compressed queries, keys and entries.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    output_groups: int
    output_rank: int
    norm: NormSpec
    rotary: RotarySpec
    entries: CompressedEntriesSpec | None = None

    @property
    def inputs(self) -> CompressorInputsSpec | None:
        """The cached inputs of the compressors: keys and gates of one or two series."""
        if (entries := self.entries) is None:
            return None
        width = self.head_dim + (entries.indexer.head_dim if entries.indexer else 0)
        return CompressorInputsSpec(self.num_heads, entries.span, 2 * width * (1 + entries.overlaps))

    @property
    def parts(self) -> "list[CompressedAttentionSpec | CompressedEntriesSpec | CompressorInputsSpec]":
        """All parts with an entry in the cache."""
        assert (self.entries is None) == (self.inputs is None)
        return [self, *([self.entries] if self.entries else []), *([self.inputs] if self.inputs else [])]

    def heads(self, group: "Communicator") -> tuple[range, bool]:
        """This rank's heads, and whether they are a copy (see HeadShare)."""
        return share_of(self.num_heads, group.rank, group.size)

    def cache_shape(self, group: "Communicator") -> CacheShape:
        return CacheShape(len(self.heads(group)[0]), 1, self.head_dim, self.head_dim)

    def kv_spec(self, layer: int, window: int | None) -> ModelKVSpec:
        return attention_spec([layer], window)
