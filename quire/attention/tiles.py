"""Tile sizes of the attention kernel, by kind of card and head size.

They were chosen by compiling the kernel: they fit into shared memory, cause no register spills, and let two programs
run on a multiprocessor at once in decode steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.attention.base import AttentionShape
from quire.platform.gpu.cards import Card


@dataclass(frozen=True)
class Tile:
    """The work of a program per iteration. rows: query heads times tokens. stages: the stages of the load pipeline.

    The block table is loaded a stage or two before the keys. Keys and values are loaded two tiles ahead with 5 stages,
    and one tile ahead with 3.
    """

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """few: for requests with at most 16 rows (for most models, those that decode). many: for all others.

    programs: the number of programs of `few` that run on a multiprocessor at once.
    """

    few: Tile
    many: Tile
    programs: int = 2


# By the kind of card, then by the largest size of a head. Compiled with Triton 3.9 for bfloat16, as (bytes of shared
# memory, registers of a thread): few    8.0: 128 (72,192, 96), 256 (75,008, 128), 576 (56,576, 121)    12.0: 128
# (38,144, 80), 256 (41,600, 96), 9.0: 128 (72,192, 100), 256 (75,008, 132), 576 (93,696, 122)         576 (37,504, 159)
# many   8.0: 96 (37,120, 188), 128 (65,792, 220), 256 (69,760, 180), 576 (76,032, 173) 9.0: 128 (98,560, 183), 256
# (131,200, 233), 576 (76,032, 169)  10.0: 128 (99,104, 186), 256 (131,744, 254) 12.0: 256 (69,760, 178), 576 (76,032,
# 178) Tiles of latents with 64 rows did not fit into registers. On 9.0, prompts with 128 keys are slower according to
# the time model.
_SMALL_MEMORY = {  # 8.6, 8.9, 12.0, 12.1: 99 KiB
    64: Tiles(Tile(16, 64, 4, 5), Tile(128, 64, 8, 3)),
    128: Tiles(Tile(16, 32, 4, 5), Tile(128, 32, 8, 3)),
    256: Tiles(Tile(16, 16, 4, 5), Tile(64, 32, 8, 3)),
    1024: Tiles(Tile(16, 16, 4, 3), Tile(32, 32, 8, 3)),
}
_AMPERE = {  # 8.0: 163 KiB
    64: Tiles(Tile(16, 64, 4, 5), Tile(128, 64, 8, 3)),
    96: Tiles(Tile(16, 64, 4, 5), Tile(128, 32, 8, 3)),  # 64 + 32: twice the addresses
    128: Tiles(Tile(16, 64, 4, 5), Tile(128, 64, 8, 3)),
    256: Tiles(Tile(16, 32, 4, 5), Tile(64, 32, 8, 3)),
    1024: Tiles(Tile(16, 32, 8, 3), Tile(32, 32, 8, 3)),
}
_HOPPER = {  # 9.0: 227 KiB; products of 64 rows and more are those of warp groups
    64: Tiles(Tile(16, 64, 4, 5), Tile(128, 64, 8, 3)),
    128: Tiles(Tile(16, 64, 4, 5), Tile(64, 64, 4, 3), 3),  # prompts: one's softmax overlaps the other's products
    256: Tiles(Tile(16, 32, 4, 5), Tile(128, 32, 8, 3)),
    1024: Tiles(Tile(16, 32, 8, 5), Tile(32, 32, 8, 3)),
}
_BLACKWELL = {  # 10.0: 227 KiB, and 512 columns of tensor memory for products of 64 rows and more
    **_HOPPER,
    128: Tiles(Tile(16, 64, 4, 5), Tile(128, 64, 8, 3), 3),
    1024: Tiles(Tile(16, 16, 4, 5), Tile(32, 32, 8, 3)),
}
_FLOAT32 = {
    64: Tiles(Tile(16, 32, 4, 3), Tile(64, 32, 8, 2)),
    128: Tiles(Tile(16, 16, 4, 3), Tile(32, 16, 8, 2)),
    256: Tiles(Tile(16, 16, 4, 3), Tile(32, 16, 8, 2)),
    1024: Tiles(Tile(16, 16, 8, 2), Tile(16, 16, 8, 2), 1),
}
_CELLS = 4096  # the largest tile of keys, in elements, that 4 warps convert without spills
_CARDS = {80: _AMPERE, 90: _HOPPER, 100: _BLACKWELL}


def choose_tiles(card: Card, shape: AttentionShape) -> Tiles:
    table = _CARDS.get(card.capability, _SMALL_MEMORY) if isinstance(card.capability, int) else _SMALL_MEMORY
    if shape.dtype.itemsize == 4:
        table = _FLOAT32
    tiles = next(tiles for size, tiles in table.items() if shape.head_dim <= size)
    if shape.cell is not None:
        tiles = _for_cells(tiles, shape.head_dim, table)
    return tiles


def _for_cells(tiles: Tiles, head_dim: int, table: dict[int, Tiles]) -> Tiles:
    """Return tiles for caches of cells, whose conversion needs registers (fewer where warp groups multiply)."""
    few = tiles.few
    many = tiles.many
    if few.keys * head_dim > _CELLS:
        few = replace(few, keys=max(16, few.keys // 2), warps=4)
    if table is _HOPPER:
        many = replace(many, keys=16) if 128 < head_dim <= 256 else many
    elif table is _BLACKWELL:
        many = replace(many, keys=32) if many.keys * head_dim > _CELLS else many
    else:
        keys = max(16, many.keys // 2) if many.keys * head_dim >= _CELLS else many.keys
        warps = 4 if head_dim <= 64 or 128 < head_dim <= 256 else many.warps
        many = replace(many, rows=max(32, many.rows // 2), keys=keys, warps=warps)
    return replace(tiles, few=few, many=many)
