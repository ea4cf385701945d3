"""Products in Triton: every form of weights, groups and tiles, and what the cards' machine code makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("triton")
import torch

from quire.ops import Kernels, Target
from quire.ops.reference.quantized import (
    QuantizedMatrix,
    concatenate,
    grouped_quantized_linear,
    quantize,
    quantized_linear,
)
from quire.ops.triton import linear
from quire.ops.triton.float8 import converts_float8
from quire.ops.triton.targets import INTERPRETED
from quire.ops.triton.tiles import row_sizes, suits_few_rows, tile_of
from quire.platform.gpu.cards import CARDS
from support.stand_in import run_on_stand_in
from support.triton_kernels import posing

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


ONE_PROGRAM = replace(CARDS["sm_80"], processors=1)
KINDS = {"as on an A100": CARDS["sm_80"], "as on an H100": CARDS["sm_90"], "one program": ONE_PROGRAM}


@pytest.fixture(params=["as on an A100", "as on an H100", pytest.param("one program", marks=pytest.mark.sampled(4))])
def tiles(request):
    """Tiles for a card with one processor, and those for cards with many: smaller ones and splits of the inputs."""
    yield from posing(KINDS[request.param])


def forms(bits: int) -> Iterator[QuantizedMatrix]:
    """Groups that are as long as a step of the kernel's loop, longer, shorter, of any size, and of the whole row."""
    torch.manual_seed(bits)
    for turn, (outs, ins, group) in enumerate(
        ((40, 256, 128), (24, 192, 64), (24, 128, 32), (20, 64, 16), (20, 66, 22), (33, 272, 272))
    ):
        matrix = quantize.reference(torch.randn(outs, ins), bits, group)
        if (turn + bits // 4) % 2:
            offsets = torch.randn(matrix.scales.shape) * matrix.scales.abs() * 8
            yield replace(matrix, offsets=offsets.half(), scales=matrix.scales.half())
        else:
            yield replace(matrix, order=torch.randperm(ins), factors=torch.rand(outs, 1, 1).half())


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("interpreter", "tiles")
@pytest.mark.parametrize(("bits", "rows"), [(8, 1), (4, 19)])
def test_products_with_all_groups_of_scales(bits, rows):
    for matrix in forms(bits):
        x, bias = torch.randn(rows, matrix.in_features) / 8, torch.randn(matrix.out_features)
        packed = linear.quantized_linear_triton.pack(matrix)
        assert torch.equal(packed.dequantize(), matrix.dequantize())
        wanted = quantized_linear.reference(x, matrix, bias)
        torch.testing.assert_close(linear.quantized_linear_triton(x, packed, bias), wanted, rtol=1e-4, atol=1e-4)
        half = linear.quantized_linear_triton(x.half(), packed, bias.half()).float()
        assert (half - wanted).norm() / wanted.norm() < (0.02 if bits == 8 else 0.004)


@pytest.mark.usefixtures("interpreter", "tiles")
def test_products_with_float8_round_the_inputs_to_float8():
    """Unless the card has no float8 products, or the groups are small."""
    torch.manual_seed(0)
    for outs, ins, group in ((40, 512, 128), (24, 256, 256), (24, 256, 32)):
        codes, scales = torch.randn(outs, ins).to(torch.float8_e4m3fn), torch.rand(outs, ins // group)
        matrix = QuantizedMatrix(codes, scales, group, ins)
        x = torch.randn(5, ins).half()
        scale = x.float().abs().amax(1, keepdim=True) / 448
        rounds = group > 32 and converts_float8(x.device)
        rounded = (x.float() / scale).to(torch.float8_e4m3fn).float() * scale if rounds else x.float()
        computed = linear.quantized_linear_triton(x, linear.quantized_linear_triton.pack(matrix), None).float()
        torch.testing.assert_close(computed, quantized_linear.reference(rounded, matrix, None), rtol=2e-3, atol=2e-2)


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("interpreter", "tiles")
@pytest.mark.parametrize("counts", [(0, 3, 0, 1), (70, 0, 17, 1, 9), (0, 0, 0)], ids=str)
def test_products_of_packed_experts(counts):
    torch.manual_seed(0)
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0)
    for bits in (8, 4):
        experts = [quantize.reference(torch.randn(24, 256), bits, 128) for _ in counts]
        pack = linear.quantized_linear_triton.pack
        (packed,) = concatenate([pack(expert) for expert in experts])
        (matrix,) = concatenate(experts)
        x, bias = torch.randn(sum(counts), 256), torch.randn(len(counts), 24)
        wanted = grouped_quantized_linear.reference(x, matrix, bias, offsets)
        for weight in (packed, pack(packed)):
            computed = linear.grouped_quantized_linear_triton(x, weight, bias, offsets)
            torch.testing.assert_close(computed, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.sampled(4))], ids=str)
def test_dense_products_of_few_rows(dtype, monkeypatch):
    """Whether a product runs in the kernel, and its result. The widest view has strides of columns."""
    rows_of_kernel = []

    def recorded(card, kind, rows, *sizes):
        rows_of_kernel.append(rows)
        return tile_of(card, kind, rows, *sizes)

    monkeypatch.setattr(linear, "tile_of", recorded)
    monkeypatch.setattr(linear, "card_of", lambda device: ONE_PROGRAM)
    torch.manual_seed(0)
    wide = torch.randn(34, 800, device=DEVICE).to(dtype)
    for outs, ins, in_kernel in ((40, 256, True), (33, 384, True), (40, 250, False), (7, 256, False)):
        weight, bias = torch.randn(outs, ins, device=DEVICE).to(dtype), torch.randn(outs, device=DEVICE).to(dtype)
        for rows, added in ((0, bias), (1, None), (2, bias), (3, None), (7, bias), (8, None), (16, bias), (17, None)):
            for x in (wide[:rows, 8 : 8 + ins], wide[: 2 * rows : 2, : 2 * ins : 2]):
                rows_of_kernel.clear()
                product = linear.linear_of_few_rows(x, weight, added)
                assert rows_of_kernel == [rows] * (in_kernel and 0 < rows <= 16)
                wanted = x.float() @ weight.float().T + (0 if added is None else added.float())
                assert (product.dtype, product.shape) == (dtype, wanted.shape)
                tolerance = 2**-6 if dtype is torch.bfloat16 else 2**-9
                torch.testing.assert_close(product.float(), wanted, rtol=tolerance, atol=tolerance)
        rows_of_kernel.clear()
        x, columns = wide[:3, :ins], weight.t().contiguous().t()
        torch.testing.assert_close(
            linear.linear_of_few_rows(x, columns, bias), linear.linear.reference(x, columns, bias)
        )
        assert not rows_of_kernel  # its loads would not be wide


def test_few_rows_take_the_kernel_where_most_processors_get_a_program():
    for card in (CARDS["sm_80"], CARDS["sm_90"], CARDS["sm_100"]):
        for outs, ins in ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096), (128_256, 4096)):
            assert suits_few_rows(card, 1, outs, ins, 2)
            assert suits_few_rows(card, 16, outs, ins, 2)
            assert not suits_few_rows(card, 17, outs, ins, 2)
            assert not suits_few_rows(card, 1, outs, ins, 4)
            assert not suits_few_rows(card, 1, outs, ins + 1, 2)
        assert not suits_few_rows(card, 1, 1024, 3072, 2)
    assert not suits_few_rows(CARDS["gfx942"], 1, 28672, 4096, 2)


def test_only_products_in_16_bits_that_may_depend_on_the_batch_have_a_kernel_for_few_rows():
    gpu = torch.device("cuda", 0)
    for dtype, batch_invariant, wanted in (
        (torch.bfloat16, False, "triton-few-rows"),
        (torch.float16, False, "triton-few-rows"),
        (torch.float32, False, "reference"),
        (torch.bfloat16, True, "triton"),
    ):
        assert Kernels(Target(gpu, dtype, batch_invariant)).chosen["linear"] == wanted


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("interpreter", "tiles")
@pytest.mark.parametrize("bits", [8, 4])
def test_with_fixed_tiles_a_row_has_the_same_bits_in_any_batch(bits, monkeypatch):
    chosen = set()

    def recorded(*args):
        chosen.add(tile_of(*args))
        return tile_of(*args)

    monkeypatch.setattr(linear, "tile_of", recorded)
    torch.manual_seed(0)
    matrix = linear.quantized_linear_triton.pack(quantize.reference(torch.randn(40, 512), bits, 128))
    x = torch.randn(70, 512).half()
    whole = linear.quantized_linear_triton(x, matrix, None, fixed=True)
    for rows in (slice(0, 1), slice(3, 20), slice(65, 70)):
        assert torch.equal(linear.quantized_linear_triton(x[rows], matrix, None, fixed=True), whole[rows])
    assert len(chosen) == 1


@pytest.mark.parametrize("card", [card for name, card in CARDS.items() if name != "gfx942"], ids=lambda card: card.name)
def test_tiles_change_only_at_the_row_sizes(card):
    for kind in ("dense", "int8", "float8", "wide", "four", "table", "float32"):
        for experts in (1, 128):
            for outs in (1024, 6144, 28672):
                limits = [0, *row_sizes(experts)]
                for low, high in zip(limits, [*limits[1:], limits[-1] + 10_000], strict=True):
                    chosen = {
                        tile_of(card, kind, rows, outs, 4096, experts) for rows in (low + 1, (low + high) // 2, high)
                    }
                    assert len(chosen) == 1


def test_few_outputs_are_split_so_that_most_processors_have_work():
    for card in (CARDS["sm_80"], CARDS["sm_90"], CARDS["sm_100"]):
        for outs, ins in ((1024, 4096), (4096, 4096), (4096, 14336), (6144, 4096), (28672, 4096)):
            tile = tile_of(card, "int8", 1, outs, ins)
            assert -(-outs // tile.outs) * tile.splits >= 0.85 * card.processors


_COMPILE = """
    import json
    import torch
    from benchmarks.gpu.machine_code import read
    from quire.ops.reference.quantized import QuantizedMatrix
    from quire.checkpoints.formats.tables import MXFP4, _TABLES
    from quire.ops.triton import linear
    results = []
    for kind, columns, rows in {cases!r}:
        dtype = torch.float8_e4m3fn if kind == "float8" else torch.uint8
        codes = torch.empty(4096, columns, dtype=dtype, device=torch.device("cuda", 0))
        group, table = (MXFP4.group, _TABLES[MXFP4.table]) if kind == "table" else (128, None)
        scales = torch.empty(4096, 4096 // group, dtype=torch.float16, device=codes.device)
        matrix = linear.quantized_linear_triton.pack(QuantizedMatrix(codes, scales, group, 4096, table=table))
        x = torch.empty(rows, 4096, dtype=torch.bfloat16, device=codes.device)
        with device.traced() as launches:
            linear.quantized_linear_triton(x, matrix, None)
        (kernel,) = (launch.kernel for launch in launches if launch.name == "_product")
        code = read(kernel)
        wide = "LDGSTS.E.BYPASS.128" in " ".join(code.instructions) and not code.instructions["LDGSTS.E.64"]
        results.append([sorted(code.products()), code.spilled, wide, code.shared <= device.card.shared_memory])
    print(json.dumps(results))
"""


_COMPILE_FEW = """
    import json
    import torch
    from benchmarks.gpu.machine_code import read
    from benchmarks.gpu.rules import broken
    from quire.ops.triton import linear
    weight = torch.empty(28672, 4096, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    results = []
    for rows in (1, 16):
        with device.traced() as launches:
            linear.linear_of_few_rows(weight.new_empty(rows, 4096), weight, None)
        (kernel,) = (launch.kernel for launch in launches if launch.kernel is not None)
        code = read(kernel)
        results.append([broken("_product", code, device.card), sorted(code.products()), sorted(code.widths())])
    print(json.dumps(results))
"""


@pytest.mark.nightly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("card", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_products_of_few_rows_keep_the_rules_of_machine_code(card):
    printed = run_on_stand_in(_COMPILE_FEW, card)
    assert json.loads(printed.splitlines()[-1]) == [[[], ["mma.sync"], [16]]] * 2


@pytest.mark.slow
def test_products_use_the_tensor_cores_of_the_card():
    """Codes of 4 bits in decoding, and float8 with as many rows as a warp group has. All load 16 bytes at once."""
    cases = [("four", 2048, 1), ("table", 2048, 1), ("float8", 4096, 64)]
    printed = run_on_stand_in(_COMPILE.format(cases=cases), "sm_90")
    assert json.loads(printed.splitlines()[-1]) == [[["mma.sync"], 0, True, True]] * 2 + [[["wgmma"], 0, True, True]]


@pytest.mark.sampled(3)
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("card", "few", "many"),
    [("sm_80", "mma.sync", "mma.sync"), ("sm_100", "mma.sync", "tcgen05"), ("sm_120", "mma.sync", "mma.sync")],
)
def test_products_fit_all_cards(card, few, many):
    cases = [
        ("four", 2048, 1),
        ("four", 2048, 2048),
        ("table", 2048, 1),
        ("table", 2048, 2048),
        ("integer", 4096, 1),
        ("integer", 4096, 2048),
        ("float8", 4096, 2048),
    ]
    printed = run_on_stand_in(_COMPILE.format(cases=cases), card)
    wanted = [[[kind], 0, True, True] for kind in (few, many, few, many, few, many, many)]
    assert json.loads(printed.splitlines()[-1]) == wanted
