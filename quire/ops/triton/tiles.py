"""Sizes of tiles for the products of linear.py, by card, kind of weight and number of rows."""

from dataclasses import dataclass, replace

from quire.platform.gpu.cards import Card


@dataclass(frozen=True)
class Tile:
    """The work of a program.

    rows, outs: the size of its results. ins: words of a row of weights that a step of its loop loads; a word is an
    element, or four codes of 4 bits. stages: the number of steps whose loads are in flight. programs: the number of
    programs for which a multiprocessor has registers (for the kinds "offsets" and "table"). splits: parts of the
    inputs, each computed by a separate program. busy: the share of multiprocessors that suffices to read weights at the
    memory's bandwidth.
    """

    rows: int
    outs: int
    ins: int
    warps: int
    stages: int
    programs: int = 1
    splits: int = 1
    busy: float = 15 / 16


# By the kind of weight and the rows of a tile. The kinds are "dense" (experts), "float32", "int8" and "float8" (8-bit
# products), "wide" (dequantized from 8 bits), "four" (four bits), "offsets" (four bits with offsets) and "table" (four
# bits that index a table).
# The first tile that gives enough multiprocessors a program is used, or else the last, with splits.
# With up to 16 rows, weights must be loaded at the memory's full bandwidth: an H100 needs about 20 KB in flight for
# each multiprocessor (3.35 TB/s, 0.8 us), which is outs * ins * (stages - 1) words of one program.
# Results of compilation (Triton 3.9, bfloat16, groups of 128; no spills, weights and inputs loaded 16 bytes at a time):
#
#   kind, rows    shared memory, registers of a thread on 8.0 | 9.0 | 10.0 | 12.0      tensor cores on 9.0, 10.0
#   int8, 16      36 KB, 94 | 36 KB, 72 | 36 KB, 72 | 36 KB, 64                        mma.sync, mma.sync
#   int8, 128     64 KB, 242 | 96 KB, 122 | 96 KB, 156 | 64 KB, 156                    wgmma, tcgen05
#   float8, 16    as "wide" | 40 KB, 40 | 40 KB, 40 |                                  wgmma, tcgen05
#   float8, 128   as "wide" | 96 KB, 170 | 96 KB, 226 | 64 KB, 244                     wgmma, tcgen05
#   wide, 128     48 KB, 240 (float8 on 8.0)
#   four, 16      54 KB, 64 | 54 KB, 66 | 54 KB, 63 | 54 KB, 64                        mma.sync, mma.sync
#   four, 128     72 KB, 174 | 112 KB, 193 | 80 KB, 170 | 72 KB, 176                   wgmma, tcgen05
#   table, 16     24 KB, 120 | 24 KB, 122 | 24 KB, 117 | 24 KB, 118 (MXFP4)            mma.sync, mma.sync
#   table, 128    72 KB, 248 | 112 KB, 155 | 112 KB, 89 | 72 KB, 210 (MXFP4)           wgmma, tcgen05
#   dense, 16     36 KB, 72 | 36 KB, 66 | 36 KB, 66 |                                  mma.sync, mma.sync
#   dense, 128    64 KB, 186 | 96 KB, 113 | 96 KB, 78 |                                wgmma, tcgen05
_TILES = {
    ("dense", 16): (Tile(16, 64, 128, 4, 4), Tile(16, 32, 128, 2, 4)),
    ("dense", 32): (Tile(32, 64, 128, 4, 4), Tile(32, 32, 128, 2, 4)),
    ("dense", 64): (Tile(64, 64, 64, 4, 4),),
    ("dense", 128): (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 3)),
    ("int8", 16): (Tile(16, 64, 256, 4, 4), Tile(16, 32, 256, 2, 4)),
    ("int8", 32): (Tile(32, 64, 128, 4, 4), Tile(32, 32, 256, 2, 4)),
    ("int8", 64): (Tile(64, 64, 128, 4, 4),),
    ("int8", 128): (Tile(128, 128, 128, 8, 3), Tile(128, 64, 128, 4, 3)),
    ("float8", 16): (Tile(16, 64, 128, 4, 4), Tile(16, 64, 256, 4, 6, busy=0.45)),
    ("float8", 32): (Tile(32, 64, 128, 4, 4), Tile(32, 64, 256, 4, 5, busy=0.45)),
    ("float8", 64): (Tile(64, 64, 128, 4, 4),),
    ("float8", 128): (Tile(128, 128, 128, 8, 3), Tile(128, 64, 128, 4, 3)),
    ("wide", 16): (Tile(16, 32, 128, 2, 7),),
    ("wide", 32): (Tile(32, 32, 128, 2, 4),),
    ("wide", 64): (Tile(64, 64, 64, 4, 3),),
    ("wide", 128): (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 3)),
    ("four", 16): (Tile(16, 32, 32, 2, 10),),
    ("four", 32): (Tile(32, 32, 32, 2, 6),),
    ("four", 64): (Tile(64, 64, 32, 4, 3),),
    ("four", 128): (Tile(128, 128, 32, 8, 3), Tile(128, 64, 32, 4, 3)),
    ("offsets", 16): (Tile(16, 32, 32, 2, 10),),
    ("offsets", 32): (Tile(32, 32, 32, 2, 6),),
    ("offsets", 64): (Tile(64, 64, 32, 4, 3),),
    ("offsets", 128): (Tile(128, 64, 32, 8, 3),),  # with more outputs, Triton 3.6 spills
    ("table", 16): (Tile(16, 32, 32, 2, 5, 8),),
    ("table", 32): (Tile(32, 32, 32, 2, 4),),
    ("table", 64): (Tile(64, 64, 32, 4, 3),),
    ("table", 128): (Tile(128, 128, 32, 8, 3), Tile(128, 64, 32, 4, 3)),
    ("float32", 16): (Tile(16, 32, 32, 4, 2),),
    ("float32", 32): (Tile(32, 32, 32, 4, 2),),
    ("float32", 64): (Tile(64, 32, 32, 4, 2),),
    ("float32", 128): (Tile(64, 64, 32, 4, 2),),
}
# Other tiles on cards whose tensor cores read operands from registers (mma.sync). There 128 outputs of 128 rows would
# need all 255 registers for sums and for products of one group, and cause spills.
_REGISTERS = {(kind, 128): (Tile(128, 64, 32, 8, 3),) for kind in ("four", "table")} | {
    ("float8", rows): (Tile(rows, 64, 128, 4, 4),)
    for rows in (16, 32)  # others do not fit into 99 KiB
}
# Tiles of dense products with up to 8 and 16 rows ("few"), without splits, so no second kernel adds parts. At least 32
# KB of weights are in flight for each program. A warp multiplies 16 outputs: with four warps, each weight would be read
# from shared memory twice, and a B200 would wait for these reads.
#
#   rows  shared memory, registers, programs per processor on 8.0 | 9.0 | 10.0 | 12.0 (Triton 3.9; mma.sync, no spills)
#   8     50 KB, 64, 3 | 50 KB, 48, 4 | 50 KB, 48, 4 | 50 KB, 48, 1
#   16    60 KB, 70, 2 | 60 KB, 72, 3 | 60 KB, 72, 3 | 60 KB, 72, 1
_FEW_ROWS = {8: Tile(8, 32, 128, 2, 6), 16: Tile(16, 32, 128, 2, 6)}
_STEPS = {16: 16, 32: 32, 64: 64, 256: 128}  # rows of an expert, at most: rows of a tile


def suits_few_rows(card: Card, rows: int, outs: int, ins: int, size: int) -> bool:
    """Return whether a dense product uses the tiles of "few": the time model predicts that they are faster than a
    library's for up to 16 rows if at least three of four multiprocessors get a program. size: bytes per element."""
    tile = _FEW_ROWS[8]
    enough = 4 * outs >= 3 * tile.outs * card.processors
    return rows <= max(_FEW_ROWS) and enough and ins % tile.ins == 0 and size == 2 and card.backend == "cuda"


def row_sizes(experts: int = 1) -> tuple[int, ...]:
    """Return the largest number of rows for each tile size; the largest tiles are also used beyond the last number.
    Only dense products of few rows have a separate tile for 8 rows.

    Products with each of these numbers of rows, and with more, compile every kernel that serving needs. With experts,
    the number of rows is tokens times experts per token.
    """
    return tuple(rows * experts for rows in _STEPS)


def tile_of(card: Card, kind: str, rows: int, outs: int, ins: int, experts: int = 1) -> Tile:
    """Return the tile for a product. rows: the rows of all experts. ins: words of a row of weights.

    The tile depends on rows only through the steps of `row_sizes`. If it leaves multiprocessors idle, the inputs are
    split.
    """
    limit = next((limit for limit in _STEPS if rows <= limit * experts), 0)
    if kind == "few":
        return next(tile for limit, tile in _FEW_ROWS.items() if rows <= limit)
    key = kind, _STEPS.get(limit, 128)
    tiles = _TILES[key] if card.capability in (90, 100, 103) else _REGISTERS.get(key, _TILES[key])
    at_once = min(experts, 4) if limit == min(_STEPS) else experts  # the number of experts that have rows
    if not limit:
        return _fitted(tiles[0], card, outs, 1)
    tile = next((t for t in tiles if -(-outs // t.outs) * at_once >= int(card.processors * t.busy)), tiles[-1])
    programs = -(-outs // tile.outs) * at_once
    enough = int(card.processors * tile.busy)
    if kind == "table" and tile.rows <= 32:  # a warp's look-ups take longer than loading its weights
        enough *= 4
    splits = 1
    while programs * splits < enough and splits < 8 and ins >= splits * 2 * 4 * tile.ins:
        splits *= 2  # each part has at least four steps
    return _fitted(tile, card, outs, splits)


def _fitted(tile: Tile, card: Card, outs: int, splits: int) -> Tile:
    width = max(16, 1 << (outs - 1).bit_length())
    # AMD's compute units have 64 KiB of shared memory, and deep pipelines take minutes to compile for them.
    stages = min(tile.stages, 2) if card.backend == "hip" else tile.stages
    return replace(tile, outs=min(tile.outs, width), stages=stages, splits=splits)
