"""KV cache specs: which entries the layers store in the KV cache, and for how long.

An entry is the data that one layer stores in one role. Entries that are stored for the same tokens form a KV group.
Each group has its own block table for every request. All groups draw blocks of the same size from one pool. Entry j of
a group is the j-th part of its blocks, so a block is as large as the group with the most bytes of entries.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

import msgspec

from quire.kv.block_pool import Block

if TYPE_CHECKING:
    from numpy import integer
    from numpy.typing import NDArray

    Ints = NDArray[integer]

Spec = TypeVar("Spec", bound="KVCacheSpec")
Lookup = Callable[[Iterable[bytes]], list[Block]]  # the blocks with these hashes, up to the first hash that has none


class CacheEntry(msgspec.Struct, frozen=True, array_like=True):
    """The data that one layer stores in one role. The role "kv" is the keys and values, or the latents, of attention;
    "indexer" is the key by which sparse attention selects a token (layers/indexer.py); "state" is the state of a
    recurrent layer; "cross" is the keys and values of an encoder's tokens; "entries", "entry_keys" and "inputs" are the
    compressed entries of attention, the keys by which they are selected, and their inputs
    (layers/compressed_attention.py)."""

    layer: int
    role: str = "kv"


class KVCacheSpec(msgspec.Struct, frozen=True, tag=True):
    """The arithmetic of a KV group. Subclasses must define first_needed_token and max_blocks, which raise
    NotImplementedError here (msgspec's structures have no abstract methods); the other methods have defaults.

    Index i of a block table covers the block_size tokens from i * block_size on. The manager uses a group only through
    these methods, which are pure arithmetic: a spec has no state.
    """

    entries: tuple[CacheEntry, ...]

    # Whether requests of one step may share a block that the step fills: true if every layer stores all of a step's
    # entries before it reads any of them.
    sharable_at_once: ClassVar[bool] = True

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(entry.layer for entry in self.entries))

    def of_layers(self, layers: Container[int]) -> Self:
        """Return the same group with the entries of these layers only, as one pipeline stage stores them."""
        return msgspec.structs.replace(self, entries=tuple(entry for entry in self.entries if entry.layer in layers))

    def starts(self, entry_bytes: Callable[[str], int]) -> list[int]:
        """Return the offset of each entry in a block, and the end of the last one. entry_bytes: returns the bytes of a
        role's entry."""
        return [0, *accumulate(entry_bytes(entry.role) for entry in self.entries)]

    def entry_sizes(self, entry_bytes: Callable[[str], int]) -> set[int]:
        """Return the different numbers of bytes of the group's entries."""
        return {entry_bytes(entry.role) for entry in self.entries}

    def page_bytes(self, entry_bytes: Callable[[str], int]) -> int:
        """Return the number of bytes of a block that this group uses."""
        return self.starts(entry_bytes)[-1]

    def first_needed_token(self, num_computed_tokens: int) -> int:
        """Return the first token whose entry is read by queries at position `num_computed_tokens` or later."""
        raise NotImplementedError

    def tokens_kept(self, num_tokens: int, block_size: int = 1) -> int:
        """Return the number of tokens whose entries must be in memory while the last of `num_tokens` tokens is
        computed."""
        return num_tokens - self.first_needed_token(num_tokens - 1)

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Return the most blocks that a request of `num_tokens` holds at once if `chunk` tokens may be in flight."""
        raise NotImplementedError

    def table_length(self, num_tokens: int, block_size: int) -> int:
        """Return the length of the block table of a request of `num_tokens`."""
        return -(-num_tokens // block_size)

    def new_blocks(self, table_length: int, num_tokens: int, block_size: int) -> range:
        """Return the indices at which a table of `table_length` needs new blocks before `num_tokens` tokens are
        computed.

        Indices outside the range get the null block.
        """
        return range(table_length, self.table_length(num_tokens, block_size))

    def full_blocks(self, first: int, num_tokens: int, block_size: int) -> range:
        """Return the indices, from `first` on, of the blocks that are complete when a step ends with `num_tokens`
        computed tokens. Only complete blocks may be found by their hash."""
        return range(first, num_tokens // block_size)

    def cached_prefix(self, hashes: Sequence[bytes], block_size: int, lookup: Lookup) -> tuple[int, list[Block]]:
        """Find the longest cached prefix of the blocks with these hashes after which a request can start.

        Returns the index of the first block that is needed, and the blocks from there to the end of the prefix. This
        default looks blocks up from the end. If one is missing, the prefix must end before it.
        """
        length = len(hashes)
        while True:
            first = self.first_needed_token(length * block_size) // block_size
            found = lookup(reversed(hashes[first:length]))
            if len(found) == length - first:
                return first, found[::-1]
            length -= len(found) + 1

    def slots(self, tables: Ints, rows: Ints, positions: Ints, block_size: int) -> Ints:
        """Return the slots of the entries of a step's tokens: block id * block_size + offset.

        tables: block ids of the group, [rows, indices]. rows, positions: [tokens] -> [tokens]
        """
        indices, offsets = divmod(positions, block_size)
        return tables[rows, indices].astype(positions.dtype) * block_size + offsets


class FullAttentionSpec(KVCacheSpec, frozen=True, tag=True):
    """Every query reads all tokens before it."""

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return 0

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        return -(-num_tokens // block_size)

    def cached_prefix(self, hashes: Sequence[bytes], block_size: int, lookup: Lookup) -> tuple[int, list[Block]]:
        """Looks blocks up from the beginning, so a prompt that is not cached costs one lookup."""
        return 0, lookup(hashes)


class LatentSpec(FullAttentionSpec, frozen=True, tag=True):
    """Full attention that stores one latent per token (MLA) instead of keys and values for each head."""


class SlidingWindowSpec(KVCacheSpec, frozen=True, tag=True):
    """A query reads the last `window` tokens, including its own."""

    window: int

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.window + 1)

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        return min(-(-num_tokens // block_size), -(-(self.window - 1 + chunk) // block_size) + 1)


class ChunkedSpec(KVCacheSpec, frozen=True, tag=True):
    """A query reads the tokens of its own chunk of the text, up to itself (Llama 4). chunk: tokens."""

    chunk: int

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.chunk * self.chunk

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        return min(-(-num_tokens // block_size), -(-(self.chunk + chunk) // block_size) + 1)


class StateSpec(KVCacheSpec, frozen=True, tag=True):
    """Recurrent layers, whose state has a fixed size and occupies a whole block.

    A step reads the state from the block that contains the token before its first one. In each block in which it
    computes tokens, it stores the state after the last of them. The block of the newest token is therefore overwritten
    until it is full. Then it is a checkpoint from which other requests may start.
    """

    sharable_at_once: ClassVar[bool] = False  # a step reads states before it stores any

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1)

    def tokens_kept(self, num_tokens: int, block_size: int = 1) -> int:
        return block_size

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        return min(-(-num_tokens // block_size), -(-(1 + chunk) // block_size) + 1)


class CrossAttentionSpec(KVCacheSpec, frozen=True, tag=True):
    """Every query reads all encoder tokens, and none of the decoder's tokens (role "cross"). length: the maximum number
    of encoder tokens.

    When a request enters, the manager allocates all blocks for its encoder tokens, and its first step fills them. They
    are not in the prefix cache, so each request begins with computed = 0.
    """

    length: int

    def first_needed_token(self, num_computed_tokens: int) -> int:
        return 0

    def tokens_kept(self, num_tokens: int, block_size: int = 1) -> int:
        return self.length

    def table_length(self, num_tokens: int, block_size: int) -> int:
        return -(-self.length // block_size)

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        return self.table_length(num_tokens, block_size)

    def new_blocks(self, table_length: int, num_tokens: int, block_size: int) -> range:
        return range(table_length, table_length)

    def full_blocks(self, first: int, num_tokens: int, block_size: int) -> range:
        return range(0)

    def cached_prefix(self, hashes: Sequence[bytes], block_size: int, lookup: Lookup) -> tuple[int, list[Block]]:
        return 0, []

    def slots(self, tables: Ints, rows: Ints, positions: Ints, block_size: int) -> Ints:
        """Return -1 for each token, because nothing is stored for the decoder's tokens."""
        return positions * 0 - 1


class StateShape(msgspec.Struct, frozen=True):
    """The sizes of a recurrent layer's state on one rank: one matrix for each head, and the last inputs of a
    convolution. decays: the number of factors by which a head's state decays with each token: 1, key_dim, or 0 if the
    scales determine the decay (the first Mamba). scales: further numbers per token and head: 1, value_dim (the first
    Mamba), or 2 * key_dim (the removal keys of RWKV-7). mlp_channels: the inputs of an MLP that also reads the token
    before, otherwise 0."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    channels: int
    conv_width: int
    decays: int = 1
    scales: int = 1
    mlp_channels: int = 0

    @property
    def state_numbers(self) -> int:
        return self.heads * self.key_dim * self.value_dim

    @property
    def token_numbers(self) -> int:
        """The count of numbers that the scan reads per token: keys, values, decays and scales."""
        return self.key_heads * self.key_dim + self.heads * (self.value_dim + self.decays + self.scales)

    def page_numbers(self, drafts: int) -> int:
        """Return the count of numbers in a page, see Pages."""
        rows = self.conv_width - 1 + drafts
        return rows * (self.channels + self.mlp_channels) + self.state_numbers + drafts * self.token_numbers + 1


class EntriesShape(msgspec.Struct, frozen=True):
    """Compressed entries (layers/compressed_spec.py). rate: the tokens of an entry. top_k: the entries that a token
    selects by keys of the size key_dim, None for all entries."""

    rate: int
    top_k: int | None
    key_dim: int


class RowsShape(msgspec.Struct, frozen=True):
    """A row of `size` numbers for each token, which every rank caches."""

    size: int
    num_kv_heads: int = 1


ModelKVSpec = FullAttentionSpec | LatentSpec | SlidingWindowSpec | ChunkedSpec | StateSpec | CrossAttentionSpec


def attention_spec(layers: Iterable[int], window: int | None = None, chunk: int | None = None) -> ModelKVSpec:
    """Return the spec of attention layers. window: how many tokens a query reads, including its own; None for all.
    chunk: the size in tokens of the chunks to which a query is restricted; None for no chunks."""
    entries = tuple(map(CacheEntry, layers))
    if chunk is not None:
        return ChunkedSpec(entries, chunk)
    return FullAttentionSpec(entries) if window is None else SlidingWindowSpec(entries, window)


class KVCacheSize(msgspec.Struct, frozen=True, array_like=True):
    """The cache that the workers allocated.

    rank_bytes: bytes of one block on each rank; pipeline stages may differ in their layers. block_size: tokens per
    block; with context parallelism, each rank stores only some of them. layout: the names of the kernels and types that
    define the format of a block.
    """

    num_blocks: int
    rank_bytes: tuple[int, ...]
    specs: tuple[ModelKVSpec, ...]
    layout: str
    block_size: int


def group_entries(kept: Sequence[Spec], max_model_len: int, shapes: Sequence[Hashable] = ()) -> list[Spec]:
    """Group entries that are stored for the same tokens so that a long request wastes little memory.

    kept: specs with the entries of the layers. shapes: the shape of each spec's entries; entries of different shapes
    get separate groups. The groups that keep the most tokens come first.

    A block is as large as the group with the most entries. With ten layers of full attention and 52 with a window, two
    groups would waste memory: each block of the ten would take the memory of 52. So the 52 are split into six groups.
    The group size is the largest one that wastes at most 5 % of the memory of a request of max_model_len. Larger groups
    are better, since each group costs the scheduler and every step a little time. Layers of a kind are assigned to its
    groups in turn, so that each pipeline stage has its share of every group. Layers with indexers stay in one group, as
    some attend to the tokens that others have selected.
    """
    kinds: dict[tuple[Spec, Hashable], list[CacheEntry]] = {}
    for spec, shape in zip(kept, shapes or [None] * len(kept), strict=True):
        kinds.setdefault((msgspec.structs.replace(spec, entries=()), shape), []).extend(spec.entries)

    def memory(size: int) -> int:
        """Return the memory, in tokens x entries, of a request of max_model_len if groups have `size` entries."""
        return sum(
            -(-len(entries) // size) * size * kind.tokens_kept(max_model_len) for (kind, _), entries in kinds.items()
        )

    least = memory(1)
    selecting = [
        entries for entries in kinds.values() if any(entry.role in ("indexer", "entry_keys") for entry in entries)
    ]
    whole = max(map(len, selecting), default=1)
    sizes = range(whole, max(map(len, kinds.values())) + 1)
    size = max((size for size in sizes if memory(size) <= 1.05 * least), default=whole)
    groups: list[Spec] = []
    for (kind, _), entries in sorted(kinds.items(), key=lambda item: -item[0][0].tokens_kept(max_model_len)):
        count = -(-len(entries) // size)
        groups += [msgspec.structs.replace(kind, entries=tuple(entries[i::count])) for i in range(count)]
    return groups
