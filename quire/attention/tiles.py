"""The tiles of the attention kernel, for each kind of card and size of heads.

They were chosen by compiling the kernel: they fit the shared memory, leave no value outside the registers, and let
two programs run on a processor at once in steps that decode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.attention.base import AttentionShape
from quire.gpu.cards import Card


@dataclass(frozen=True)
class Tile:
    """What a program computes at a time. rows: query heads times tokens. stages: of the pipeline of loads.

    The block table is loaded a stage or two before the keys. With 5 stages, keys and values are loaded two tiles ahead,
    with 3 one tile.
    """

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """few: for requests with at most 16 rows (for most models, those that decode). many: for all others.

    programs: how many programs of `few` run on a processor at once.
    """

    few: Tile
    many: Tile
    programs: int = 2


# By the kind of card, then by the largest size of a head. In brackets: bytes of shared memory, registers of a thread,
# and programs on a processor, for bfloat16. Attention with a window and a soft cap takes the most registers.
_SMALL_MEMORY = {  # 8.6, 8.9, 12.0, 12.1: 99 KiB
    64: Tiles(Tile(16, 64, 4, 5), Tile(128, 64, 8, 3)),
    128: Tiles(Tile(16, 32, 4, 5), Tile(128, 32, 8, 3)),
    256: Tiles(Tile(16, 16, 4, 5), Tile(64, 32, 8, 3)),
    1024: Tiles(Tile(16, 16, 8, 3), Tile(32, 32, 8, 3)),
}
_AMPERE = {  # 8.0: 163 KiB
    64: Tiles(Tile(16, 64, 4, 5), Tile(128, 64, 8, 3)),
    128: Tiles(Tile(16, 64, 4, 5), Tile(128, 64, 8, 3)),
    256: Tiles(Tile(16, 32, 4, 5), Tile(64, 32, 8, 3)),
    1024: Tiles(Tile(16, 32, 8, 3), Tile(32, 32, 8, 3)),
}
_HOPPER = {  # 9.0: 227 KiB; products of 64 rows and more are those of warp groups
    64: Tiles(Tile(16, 64, 4, 5), Tile(128, 64, 8, 3)),
    128: Tiles(Tile(16, 64, 4, 5), Tile(64, 64, 4, 3), 3),  # of prompts two: one's softmax during the other's products
    256: Tiles(Tile(16, 32, 4, 5), Tile(128, 32, 8, 3)),
    1024: Tiles(Tile(16, 32, 8, 5), Tile(32, 32, 8, 3)),
}
_BLACKWELL = {  # 10.0: 227 KiB, and 512 columns of tensor memory for products of 64 rows and more
    **_HOPPER,
    128: Tiles(Tile(16, 64, 4, 5), Tile(128, 64, 8, 3), 3),
    1024: Tiles(Tile(16, 16, 8, 5), Tile(32, 32, 8, 3)),
}
_FLOAT32 = {
    64: Tiles(Tile(16, 32, 4, 3), Tile(64, 32, 8, 2)),
    128: Tiles(Tile(16, 32, 4, 3), Tile(64, 16, 8, 2)),
    256: Tiles(Tile(16, 16, 4, 3), Tile(32, 16, 8, 2)),
    1024: Tiles(Tile(16, 16, 8, 2), Tile(16, 16, 8, 2), 1),
}
_CELLS = 4096  # elements of a tile of keys that a program of 4 warps converts without spills
_CARDS = {80: _AMPERE, 90: _HOPPER, 100: _BLACKWELL}


def choose_tiles(card: Card, shape: AttentionShape) -> Tiles:
    table = _CARDS.get(card.capability, _SMALL_MEMORY) if isinstance(card.capability, int) else _SMALL_MEMORY
    if shape.dtype.itemsize == 4:
        table = _FLOAT32
    tiles = next(tiles for size, tiles in table.items() if shape.head_dim <= size)
    if shape.cell is not None:
        tiles = _for_cells(tiles, shape.head_dim, table in (_HOPPER, _BLACKWELL))
    return tiles


def _for_cells(tiles: Tiles, head_dim: int, has_warp_groups: bool) -> Tiles:
    """Tiles for caches of cells, whose conversion takes registers (not where warp groups multiply)."""
    few, many = tiles.few, tiles.many
    if few.keys * head_dim > _CELLS:
        few = replace(few, keys=max(16, few.keys // 2), warps=4)
    if not has_warp_groups:
        keys = max(16, many.keys // 2) if many.keys * head_dim > _CELLS else many.keys
        many = replace(many, rows=max(32, many.rows // 2), keys=keys)
    return replace(tiles, few=few, many=many)
