"""Sizes of tiles for the products of linear.py, by card, kind of weight and number of rows."""

from dataclasses import dataclass, replace

from quire.gpu.cards import Card


@dataclass(frozen=True)
class Tile:
    """What a program computes, and how. rows, outs: of its results; ins: bytes of a row of weights that a step of its
    loop loads (elements of dense weights). stages: steps whose loads are under way at a time. splits: parts of the
    inputs, each computed by a program of its own."""

    rows: int
    outs: int
    ins: int
    warps: int
    stages: int
    splits: int = 1


# By the kind of weight ("dense", "float32", "eight": products of 8 bits, "wide": 8 bits that are dequantized, "four")
# and the rows of a tile. The first tile that gives each processor a program is taken, or the last.
_TILES = {
    ("dense", 16): (Tile(16, 64, 128, 4, 4), Tile(16, 32, 128, 2, 4)),
    ("dense", 32): (Tile(32, 64, 128, 4, 4), Tile(32, 32, 128, 2, 4)),
    ("dense", 64): (Tile(64, 64, 64, 4, 4),),
    ("dense", 128): (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 3)),
    ("eight", 16): (Tile(16, 64, 256, 4, 4), Tile(16, 32, 256, 2, 4)),
    ("eight", 32): (Tile(32, 64, 128, 4, 4), Tile(32, 32, 256, 2, 4)),
    ("eight", 64): (Tile(64, 64, 128, 4, 4),),
    ("eight", 128): (Tile(128, 128, 128, 8, 3), Tile(128, 64, 128, 4, 3)),
    ("wide", 16): (Tile(16, 64, 128, 4, 4), Tile(16, 32, 128, 2, 4)),
    ("wide", 32): (Tile(32, 64, 128, 4, 3), Tile(32, 32, 128, 2, 4)),
    ("wide", 64): (Tile(64, 64, 64, 4, 3),),
    ("wide", 128): (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 3)),
    ("four", 16): (Tile(16, 64, 64, 4, 4), Tile(16, 32, 64, 2, 4)),
    ("four", 32): (Tile(32, 64, 64, 4, 4), Tile(32, 32, 64, 2, 4)),
    ("four", 64): (Tile(64, 64, 64, 4, 3),),
    ("four", 128): (Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 3)),
    ("float32", 16): (Tile(16, 32, 32, 4, 2),),
    ("float32", 32): (Tile(32, 32, 32, 4, 2),),
    ("float32", 64): (Tile(64, 32, 32, 4, 2),),
    ("float32", 128): (Tile(64, 64, 32, 4, 2),),
}
_STEPS = {16: 16, 32: 32, 64: 64, 256: 128}  # rows of an expert, at most: rows of a tile


def row_sizes(experts: int = 1) -> tuple[int, ...]:
    """The largest numbers of rows for which tiles of one size serve; the largest tiles serve for all beyond the last.

    Products of each of these numbers of rows, and of more, compile every kernel that serving needs. With experts, rows
    are tokens times experts of a token.
    """
    return tuple(rows * experts for rows in _STEPS)


def tile_of(card: Card, kind: str, rows: int, outs: int, ins: int, experts: int = 1) -> Tile:
    """rows: of all experts. ins: bytes of a row of weights (elements of dense weights).

    The tile depends on rows only through the steps of `row_sizes`. If it leaves processors without work, the inputs are
    split.
    """
    limit = next((limit for limit in _STEPS if rows <= limit * experts), 0)
    tiles = _TILES[kind, _STEPS.get(limit, 128)]
    enough, at_once = card.processors * 15 // 16, min(experts, 4)  # at least so many experts have rows
    if not limit:
        return replace(tiles[0], outs=min(tiles[0].outs, _power(outs)))
    tile = next((tile for tile in tiles if -(-outs // tile.outs) * at_once >= enough), tiles[-1])
    programs = -(-outs // tile.outs) * at_once
    splits = 1
    while programs * splits < enough and splits < 8 and ins >= splits * 2 * 4 * tile.ins:
        splits *= 2  # each part has at least four steps
    return replace(tile, outs=min(tile.outs, _power(outs)), splits=splits)


def _power(outs: int) -> int:
    return max(16, 1 << (outs - 1).bit_length())
