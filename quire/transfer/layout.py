"""The layout of a rank's blocks, and the mapping from other ranks' blocks to it.

A block of a KV group contains the entries of the group's layers on this rank, one after the other. An entry contains
the rank's KV heads in order, head_bytes each, followed by padding. A layer of sparse attention has two entries: its
latents, and the keys of its indexer.

    | layer 0: head 2, head 3, padding | layer 5: head 2, head 3, padding | ...
    | layer 0: latent, padding | layer 0: indexer's key, padding | layer 1: latent, padding | ...
"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from quire.layers.attention_spec import AttentionSpec, HeadShare

if TYPE_CHECKING:
    from quire.attention.base import AttentionBackend
    from quire.kv.specs import KVCacheSpec
    from quire.models.spec import MixerSpec
    from quire.parallel.mesh import Communicator

Run = tuple[int, int, int]  # offset in the other rank's block, offset in this rank's block, number of bytes
Plan = tuple[dict[int, list[Run]], ...]  # for each KV group: the runs to read, by the other rank's number
ALL_LAYERS = range(1 << 30)
_MOST_HEADS = 1 << 20  # in all layers of a rank


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One role's part (see CacheEntry) of a layer's KV cache on a rank: num_heads KV heads of head_bytes each, starting
    with first_head. Latents (MLA) and the keys of an indexer count as one head. start: the entry's offset in a block.
    """

    layer: int
    role: str
    first_head: int
    num_heads: int
    start: int
    head_bytes: int

    @property
    def stop(self) -> int:
        """The end of the last head; padding may follow."""
        return self.start + self.num_heads * self.head_bytes


class GroupLayout(msgspec.Struct, frozen=True, array_like=True):
    """The entries of one KV group, in their order in a block. format: describes the bytes of a head, for all roles."""

    format: str
    entries: tuple[Entry, ...]

    def heads(self, layers: range) -> Iterator[tuple[Entry, int, int]]:
        """Yield each KV head of these layers: its entry, its number and its offset in the block."""
        for entry in self.entries:
            if entry.layer not in layers:
                continue
            for place in range(entry.num_heads):
                yield entry, entry.first_head + place, entry.start + place * entry.head_bytes


class RankLayout(msgspec.Struct, frozen=True, array_like=True):
    """The layout of one rank's blocks."""

    block_bytes: int
    groups: tuple[GroupLayout, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for impossible layouts. msgspec also calls this for layouts received from other engines."""
        entries = [entry for group in self.groups for entry in group.entries]
        heads = [entry.num_heads for entry in entries]
        if min(heads, default=0) < 0 or sum(heads) > _MOST_HEADS:
            raise ValueError(f"the rank has {sum(heads):,} KV heads in all layers; at most {_MOST_HEADS:,} are allowed")
        for entry in entries:
            if entry.start < 0 or entry.head_bytes <= 0 or entry.stop > self.block_bytes:
                raise ValueError(
                    f"an entry of {entry.num_heads} heads of {entry.head_bytes} bytes at byte {entry.start} does not "
                    f"fit into {self.block_bytes} bytes"
                )

    def parts(self, most: int) -> list[range]:
        """Divide the layers into `most` equal parts, or one part per layer if there are fewer layers."""
        layers = sorted({entry.layer for group in self.groups for entry in group.entries})
        number = min(most, len(layers))
        stops = [layers[len(layers) * part // number - 1] + 1 for part in range(1, number + 1)]
        return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]

    def span(self, group: int, layers: range) -> slice:
        """Return the byte range of a KV group's block that contains the entries of these layers."""
        entries = [entry for entry in self.groups[group].entries if entry.layer in layers]
        return slice(entries[0].start, entries[-1].stop) if entries else slice(0, 0)


def rank_layout(
    mixers: "Sequence[MixerSpec | None]",
    tp: "Communicator",
    kv_specs: "Sequence[KVCacheSpec]",
    backends: "Sequence[AttentionBackend]",
    block_bytes: int,
) -> RankLayout:
    """Return the layout of a rank. mixers: for all layers of the model. kv_specs, backends: for the rank's KV
    groups."""
    groups = []
    for spec, backend in zip(kv_specs, backends, strict=True):
        entries = []
        for entry, start in zip(spec.entries, spec.starts(backend.entry_bytes), strict=False):
            mixer = mixers[entry.layer]
            heads = HeadShare.of(mixer, tp).kv_heads if isinstance(mixer, AttentionSpec) else range(1)
            owner = backend.of_role(entry.role)
            num_heads, *rest = owner.block_shape
            assert len(heads) == num_heads
            size = math.prod(rest) * owner.cache_dtype.itemsize
            entries.append(Entry(entry.layer, entry.role, heads.start, num_heads, start, size))
        owners = dict.fromkeys(backend.of_role(role) for role in ("kv", "indexer"))
        groups.append(GroupLayout("; ".join(map(_format, owners)), tuple(entries)))
    return RankLayout(block_bytes, tuple(groups))


def _format(backend: "AttentionBackend") -> str:
    shape = backend.shape
    return (
        f"{backend.name}, {backend.cache_dtype}, {shape.cell or shape.dtype}, heads of {shape.head_dim}, "
        f"values of {shape.out_dim}, {backend.tokens_per_block} tokens"
    )


def plan(own: RankLayout, others: Sequence[RankLayout], prefer: int, layers: range = ALL_LAYERS) -> Plan:
    """Return the bytes of the other ranks' blocks that fill these layers of this rank's blocks, for each KV group.
    Adjacent runs are merged.

    own: this rank's layout. prefer: this rank's number. If several ranks have the same KV head, different values of
    `prefer` choose different ranks, which spreads the load. Raises ValueError if this rank's blocks cannot be filled.
    """
    if any(len(other.groups) != len(own.groups) for other in others):
        raise ValueError(
            f"the engines have different numbers of KV groups: {len(own.groups)} here, "
            f"{len(others[0].groups)} there; give both the same max_model_len"
        )
    return tuple(
        _plan_group(number, group, [other.groups[number] for other in others], prefer, layers)
        for number, group in enumerate(own.groups)
    )


def _plan_group(
    number: int, own: GroupLayout, others: Sequence[GroupLayout], prefer: int, layers: range
) -> dict[int, list[Run]]:
    holders: dict[tuple[int, str, int], list[tuple[int, Entry, int]]] = {}  # by head: ranks, entries and offsets
    for rank, other in enumerate(others):
        for entry, head, offset in other.heads(layers):
            holders.setdefault((entry.layer, entry.role, head), []).append((rank, entry, offset))
    smallest = min((entry.head_bytes for entry in own.entries), default=0)
    runs: dict[int, list[Run]] = {}
    for entry, head, offset in own.heads(layers):
        if (entry.layer, entry.role, head) not in holders:
            raise ValueError(
                f"no rank of the other engine has layer {entry.layer}, KV head {head} in its KV group {number}"
            )
        found = holders[entry.layer, entry.role, head]
        rank, there, remote = found[prefer % len(found)]
        other = others[rank]
        if (other.format, there.head_bytes) != (own.format, entry.head_bytes):
            raise ValueError(
                f"layer {entry.layer} has {entry.head_bytes} bytes for each KV head here ({own.format}), and "
                f"{there.head_bytes} there ({other.format})"
            )
        of_rank = runs.setdefault(rank, [])
        if of_rank and _follows(of_rank[-1], remote, offset, smallest):
            first_remote, first, _ = of_rank[-1]
            of_rank[-1] = first_remote, first, offset + entry.head_bytes - first
        else:
            of_rank.append((remote, offset, entry.head_bytes))
    return runs


def _follows(run: Run, remote: int, offset: int, smallest: int) -> bool:
    """Whether a head directly follows a run in both blocks, or follows it after equal padding. smallest: the bytes of
    the smallest head in this rank's group; a smaller gap is padding."""
    gap = offset - run[1] - run[2]
    return remote - run[0] - run[2] == gap and gap < smallest
