"""Where a rank keeps the entries of its layers in a block, and which bytes of other ranks' blocks fill its own.

A block of a KV group has an entry for each layer of the group on this rank, at a multiple of entry_bytes. An entry has
the rank's KV heads one after the other, each with head_bytes, and then padding:

    | layer 0: head 2, head 3, padding | layer 5: head 2, head 3, padding | ...
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from quire.layers.attention_spec import AttentionSpec, HeadShare

if TYPE_CHECKING:
    from quire.attention.base import AttentionBackend
    from quire.kv.specs import KVCacheSpec
    from quire.models.spec import MixerSpec
    from quire.parallel.mesh import Communicator

Run = tuple[int, int, int]  # offset in the other rank's block, offset in the own block, number of bytes
Plan = tuple[dict[int, list[Run]], ...]  # for each KV group: what to read, by the number of the other rank
ALL_LAYERS = range(1 << 30)
_MOST_HEADS = 1 << 20  # of all layers of a rank


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What a rank keeps of one layer: num_heads KV heads, from first_head on. Latents (MLA) count as one head."""

    layer: int
    first_head: int
    num_heads: int


class GroupLayout(msgspec.Struct, frozen=True, array_like=True):
    """The entries of one KV group. format: what the bytes of a head mean."""

    format: str
    entry_bytes: int
    head_bytes: int
    entries: tuple[Entry, ...]

    def heads(self, layers: range) -> Iterator[tuple[int, int, int]]:
        """The layer and the number of each KV head of these layers, and its offset in the block."""
        for index, entry in enumerate(self.entries):
            if entry.layer not in layers:
                continue
            for place in range(entry.num_heads):
                yield entry.layer, entry.first_head + place, index * self.entry_bytes + place * self.head_bytes


class RankLayout(msgspec.Struct, frozen=True, array_like=True):
    """The layout of one rank's blocks."""

    block_bytes: int
    groups: tuple[GroupLayout, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for what no engine has; msgspec calls this for layouts of other engines, too."""
        heads = [entry.num_heads for group in self.groups for entry in group.entries]
        if min(heads, default=0) < 0 or sum(heads) > _MOST_HEADS:
            raise ValueError(f"the rank has {sum(heads):,} KV heads in all layers; at most {_MOST_HEADS:,} are allowed")
        for group in self.groups:
            most = max((entry.num_heads for entry in group.entries), default=1)
            is_positive = group.entry_bytes > 0 and group.head_bytes > 0
            is_inside = len(group.entries) * group.entry_bytes <= self.block_bytes
            if not is_positive or not is_inside or most * group.head_bytes > group.entry_bytes:
                raise ValueError(
                    f"{len(group.entries)} entries of {group.entry_bytes} bytes, with up to {most} heads "
                    f"of {group.head_bytes}, do not fit into {self.block_bytes} bytes"
                )

    def parts(self, most: int) -> list[range]:
        """Divides the layers into as many equal parts, at most."""
        layers = sorted(entry.layer for group in self.groups for entry in group.entries)
        number = min(most, len(layers))
        stops = [layers[len(layers) * part // number - 1] + 1 for part in range(1, number + 1)]
        return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]

    def span(self, group: int, layers: range) -> slice:
        """The bytes of a block of a KV group in which the entries of these layers are."""
        part = self.groups[group]
        indices = [index for index, entry in enumerate(part.entries) if entry.layer in layers]
        return slice(indices[0] * part.entry_bytes, (indices[-1] + 1) * part.entry_bytes) if indices else slice(0, 0)


def rank_layout(
    mixers: "Sequence[MixerSpec | None]",
    tp: "Communicator",
    kv_specs: "Sequence[KVCacheSpec]",
    backends: "Sequence[AttentionBackend]",
    block_bytes: int,
) -> RankLayout:
    """The layout of a rank. mixers: of all layers of the model. kv_specs, backends: of the rank's KV groups.

    Raises ConfigError for layers with more entries than one.
    """
    groups = []
    for spec, backend in zip(kv_specs, backends, strict=True):
        num_heads, *rest = backend.block_shape
        shape = backend.shape
        size = backend.cache_dtype.itemsize
        for number in rest:
            size *= number
        name = (
            f"{backend.name}, {backend.cache_dtype}, {shape.cell or shape.dtype}, heads of {shape.head_dim}, "
            f"values of {shape.out_dim}, {backend.tokens_per_block} tokens"
        )
        entries = []
        for layer in spec.layers:
            mixer = mixers[layer]
            heads = HeadShare.of(mixer, tp).kv_heads if isinstance(mixer, AttentionSpec) else range(1)
            assert len(heads) == num_heads
            entries.append(Entry(layer, heads.start, num_heads))
        groups.append(GroupLayout(name, backend.entry_bytes(), size, tuple(entries)))
    return RankLayout(block_bytes, tuple(groups))


def plan(own: RankLayout, others: Sequence[RankLayout], prefer: int, layers: range = ALL_LAYERS) -> Plan:
    """Which bytes of the others' blocks fill these layers of an own block, for each KV group. Adjacent runs are merged.

    prefer: the own rank's number. Of several ranks that keep the same KV head, different numbers read different ones.
    Raises ValueError if the own blocks cannot be filled.
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
    holders: dict[tuple[int, int], list[tuple[int, int]]] = {}  # of a layer's head: ranks, and offsets there
    for rank, other in enumerate(others):
        for layer, head, offset in other.heads(layers):
            holders.setdefault((layer, head), []).append((rank, offset))
    runs: dict[int, list[Run]] = {}
    for layer, head, offset in own.heads(layers):
        if (layer, head) not in holders:
            raise ValueError(f"no rank of the other engine has layer {layer}, KV head {head} in its KV group {number}")
        found = holders[layer, head]
        rank, remote = found[prefer % len(found)]
        other = others[rank]
        if (other.format, other.head_bytes) != (own.format, own.head_bytes):
            raise ValueError(
                f"layer {layer} has {own.head_bytes} bytes for each KV head here ({own.format}), and "
                f"{other.head_bytes} there ({other.format})"
            )
        of_rank = runs.setdefault(rank, [])
        if of_rank and _follows(of_rank[-1], remote, offset, own, other):
            first_remote, first, _ = of_rank[-1]
            of_rank[-1] = first_remote, first, offset + own.head_bytes - first
        else:
            of_rank.append((remote, offset, own.head_bytes))
    return runs


def _follows(run: Run, remote: int, offset: int, own: GroupLayout, other: GroupLayout) -> bool:
    """Whether a head stands right behind a run in both blocks, or behind the same padding in both."""
    gap = offset - run[1] - run[2]
    if remote - run[0] - run[2] != gap:
        return False
    starts_entries = not offset % own.entry_bytes and not remote % other.entry_bytes
    return not gap or (starts_entries and gap < own.head_bytes)  # no other head fits into the gap
