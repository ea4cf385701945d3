"""Products in Triton with codes of 4 bits that stand for the values of a table: tables, groups, scales, and the PTX."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("triton")
import torch

from quire.checkpoints.formats.ggml_blocks import _IQ4
from quire.checkpoints.formats.tables import _TABLES
from quire.ops.reference.quantized import QuantizedMatrix, concatenate, grouped_quantized_linear, quantized_linear
from quire.ops.triton import linear
from quire.ops.triton.packed import pack, words_of
from quire.ops.triton.targets import INTERPRETED
from quire.ops.triton.weights import _lookup
from quire.platform.gpu.cards import CARDS

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TABLES = {**_TABLES, "iq4": _IQ4}
each_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


@pytest.fixture
def tiles(monkeypatch):
    """Tiles for a card with many processors: small ones, and splits of the inputs."""
    monkeypatch.setattr(linear, "card_of", lambda device: CARDS["sm_80"])


def matrix_of(table: tuple[float, ...], outs: int, ins: int, group: int, scales: str) -> QuantizedMatrix:
    """A weight with random codes. scales: their type, with /1 or /2 if each output has so many factors besides."""
    codes = torch.randint(0, 256, (outs, -(-ins // 2)), dtype=torch.uint8, device=DEVICE)
    size, factors = (outs, -(-ins // group)), None
    kind, _, count = scales.partition("/")
    if kind == "exponents":
        values = torch.randint(-4, 4, size, device=DEVICE).float().exp2().bfloat16()
    elif kind == "int8":
        values = torch.randint(-32, 32, size, dtype=torch.int8, device=DEVICE)
    else:
        values = torch.randn(size, device=DEVICE).to(getattr(torch, kind))
    if count:
        factors = torch.rand(outs, int(count), 1, device=DEVICE)
    return QuantizedMatrix(codes, values, group, ins, factors=factors, table=table)


def matrices(table: tuple[float, ...]) -> Iterator[QuantizedMatrix]:
    """Groups of all sizes; inputs that are no whole words, groups or runs; and enough inputs for two splits."""
    for outs, ins, group, scales in (
        (40, 256, 128, "float32"),
        (24, 448, 64, "float32"),
        (33, 160, 32, "exponents"),
        (20, 150, 32, "float16"),
        (24, 112, 16, "float16/1"),
        (16, 512, 32, "int8/2"),
        (7, 66, 22, "float32"),
        (16, 48, 48, "float16"),
        (9, 2080, 32, "bfloat16"),
    ):
        yield matrix_of(table, outs, ins, group, scales)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.usefixtures("interpreter", "tiles")
@pytest.mark.parametrize(
    "table", [pytest.param(TABLES[name], marks=[pytest.mark.sampled(4)] * (name != "e2m1"), id=name) for name in TABLES]
)
def test_products_with_all_groups_and_scales(table):
    torch.manual_seed(0)
    for turn, matrix in enumerate(matrices(table)):
        rows = (1, 19)[turn % 2]
        x, bias = torch.randn(rows, matrix.in_features, device=DEVICE), torch.randn(matrix.out_features, device=DEVICE)
        packed = pack(matrix)
        assert packed.bits == 4
        assert torch.equal(packed.dequantize(), matrix.dequantize())
        for dtype, tolerance in ((torch.float32, 1e-5), ((torch.float16, 1e-3), (torch.bfloat16, 1e-2))[turn % 2]):
            rounded, added = x.to(dtype), bias.to(dtype)
            wanted = quantized_linear.reference(rounded.float(), matrix, added.float())
            computed = linear.quantized_linear_triton(rounded, packed, added)
            assert computed.dtype is dtype
            assert (computed.float() - wanted).norm() < tolerance * wanted.norm(), (dtype, matrix.group)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("interpreter", "tiles")
@pytest.mark.parametrize("counts", [(0, 3, 0, 1), (70, 0, 17), (0, 0, 0)], ids=str)
def test_experts_with_tables(counts):
    """As in gpt-oss, whose rows are no whole runs of groups, and with a factor for each expert."""
    torch.manual_seed(0)
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
    for group, scales in ((32, "exponents"), (16, "float16/1")):
        experts = [matrix_of(TABLES["e2m1"], 24, 160, group, scales) for _ in counts]
        (packed,) = concatenate([pack(expert) for expert in experts])
        (matrix,) = concatenate(experts)
        x = torch.randn(sum(counts), 160, device=DEVICE)
        bias = torch.randn(len(counts), 24, device=DEVICE)
        wanted = grouped_quantized_linear.reference(x, matrix, bias, offsets)
        computed = linear.grouped_quantized_linear_triton(x, pack(packed), bias, offsets)
        torch.testing.assert_close(computed, wanted, rtol=1e-4, atol=1e-3)


def executed(ptx: str, words: int) -> int:
    """What the instructions leave in $0, if $1 has these two words."""
    values = {"$1": words}

    def value(name: str) -> int:
        return values[name] if name in values else int(name, 0) & 0xFFFFFFFF

    for line in ptx.strip("{} \n").split(";"):
        operation, _, operands = line.strip().partition(" ")
        if operation in ("", ".reg"):
            continue
        target, *names = (name.strip() for name in operands.split(","))
        a, *others = (value(name) for name in names)
        if operation == "mov.b32":
            values[target] = a
        elif operation == "shr.u32":
            values[target] = a >> others[0]
        elif operation == "and.b32":
            values[target] = a & others[0]
        elif operation == "lop3.b32":
            assert others[2] == 0xEA
            values[target] = a & others[0] | others[1]
        else:
            assert operation == "prmt.b32"
            sources = (a | others[0] << 32).to_bytes(8, "little")
            picks = [others[1] >> 4 * i & 15 for i in range(4)]
            signs = [255 * (sources[pick & 7] >> 7) if pick & 8 else sources[pick] for pick in picks]
            values[target] = int.from_bytes(signs, "little")
    return values["$0"]


@each_table
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_instructions_look_up_every_code_in_every_place(table, dtype):
    bits = torch.tensor(table, dtype=torch.float32).to(dtype).view(torch.uint16).tolist()
    for quarter in range(4):
        ptx = _lookup(quarter, words_of(table, dtype))
        for code in range(16):
            words = (0x0F1E2D3C * (code + 1) + code) & 0xFFFFFFFF & ~(0xF000F << 4 * quarter)
            words |= code << 4 * quarter | (15 - code) << 4 * quarter + 16
            assert executed(ptx, words) == bits[code] | bits[15 - code] << 16
