"""Operations on GPUs with batch_invariant, under Triton's interpreter: a row has the same result bit for bit in every
batch, at every place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from quire.ops import OPS
from quire.ops.reference.quantized import QuantizedMatrix, quantize
from quire.ops.registry import Target
from quire.ops.triton import dense
from quire.ops.triton.targets import INTERPRETED
from quire.platform.gpu.cards import CARDS

pytestmark = pytest.mark.usefixtures("interpreter")

GPU = torch.device("cuda", 0)
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ROWS = 130
FEW_ROWS = 67  # where a program computes a row
each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.sampled(6))], ids=str
)
Function = Callable[[Tensor], Tensor]  # of [rows, ...] by rows


def chosen(name: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The implementation that an engine on a GPU would choose with batch_invariant."""
    implementation = OPS[name].choose(Target(GPU, dtype, batch_invariant=True))
    assert implementation.name != "reference"
    return implementation.function


@pytest.fixture(autouse=True)
def few_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that divides sums of one row, and computes those of many rows as a whole."""
    torch.manual_seed(0)
    card = CARDS["sm_90"].__class__(**{**vars(CARDS["sm_90"]), "processors": 2})
    monkeypatch.setattr(dense, "card_of", lambda device: card)


def check(function: Function, x: Tensor, *, alone: tuple[int, ...] = (5, 129)) -> None:
    """Compare rows that are computed alone, and in batches of 3, 17, 64 and 130."""
    whole = function(x.clone())
    assert torch.isfinite(whole.float()).all()
    batches = [(i, i + 1) for i in alone] + [(4, 7), (50, 67), (66, 130)]
    for start, stop in (batch for batch in batches if batch[1] <= len(x)):
        got = function(x[start:stop].clone())
        different = (got != whole[start:stop]).flatten(1).any(1).sum().item()
        assert different == 0, f"{different} of the rows {start} to {stop - 1} differ"


@pytest.mark.sampled(2)
@each_dtype
def test_adapters(dtype):
    """A token's adapter is given by its first input, so that it moves with its row."""
    a, b = (torch.randn(*size, device=DEVICE).to(dtype) / 8 for size in ((3, 2, 5, 300), (3, 5, 200)))
    ranks, bounds = torch.tensor([5, 0, 3], device=DEVICE), torch.tensor([0, 70, 200], device=DEVICE)
    add_lora = chosen("add_lora", dtype)

    def product(x: Tensor) -> Tensor:
        slots = (x[:, 0].float().abs() * 100).long() % 4 - 1
        return add_lora(torch.ones(len(x), 200, dtype=dtype, device=DEVICE), x, a, b, slots, ranks, bounds)

    check(product, torch.randn(FEW_ROWS, 300, device=DEVICE).to(dtype), alone=(5,))


@pytest.mark.sampled(4)
@each_dtype
@pytest.mark.parametrize(("ins", "outs"), [(1100, 40), (33, 150)])
def test_linear(dtype, ins, outs):
    weight, bias = (torch.randn(outs, ins, device=DEVICE) / ins**0.5).to(dtype), torch.randn(outs, device=DEVICE)
    linear = chosen("linear", dtype)
    check(lambda x: linear(x, weight, bias.to(dtype)), torch.randn(ROWS, ins, device=DEVICE).to(dtype))


def test_a_sum_is_divided_for_few_rows_and_has_the_same_bits(monkeypatch):
    launches: list[tuple[int, ...]] = []

    class Watched:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    kernel = dense._dense
    monkeypatch.setattr(dense, "_dense", Watched())
    x, weight = torch.randn(ROWS, 1100, device=DEVICE), torch.randn(30, 1100, device=DEVICE)
    whole = chosen("linear", torch.float32)(x, weight, None)
    assert torch.equal(chosen("linear", torch.float32)(x[7:8], weight, None), whole[7:8])
    assert [grid[2] for grid in launches] == [1, 2]


@pytest.mark.sampled(2)
@each_dtype
def test_linear_by_head(dtype):
    weight = (torch.randn(3, 20, 64, device=DEVICE) / 8).to(dtype)
    by_head = chosen("linear_by_head", dtype)
    check(lambda x: by_head(x, weight), torch.randn(ROWS, 3, 64, device=DEVICE).to(dtype), alone=(0, 129))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("int8", torch.float16),
        ("int4", torch.float16),
        ("fp8", torch.float32),
        *(
            pytest.param(form, dtype, marks=pytest.mark.sampled(6))
            for form, dtype in (
                ("int8", torch.float32),
                ("int4", torch.float32),
                ("table", torch.float16),
                ("table", torch.float32),
                ("fp8", torch.float16),
            )
        ),
    ],
    ids=str,
)
def test_quantized_linear(dtype, form):
    weight = torch.randn(40, 128) / 8
    matrix = QuantizedMatrix(weight.to(torch.float8_e4m3fn).to(DEVICE), torch.ones(40, 1, device=DEVICE), 128, 128)
    if form != "fp8":
        matrix = quantize.reference(weight.to(DEVICE), 8 if form == "int8" else 4, 64)
    if form == "table":
        matrix = replace(quantize.reference(weight.to(DEVICE), 4, 32), table=tuple(torch.randn(16).tolist()))
    linear = chosen("quantized_linear", dtype)
    packed = linear.pack(matrix)  # type: ignore[attr-defined]
    check(lambda x: linear(x, packed, None), torch.randn(ROWS, 128, device=DEVICE).to(dtype), alone=(0, 129))


@pytest.mark.sampled(6)
@each_dtype
@pytest.mark.parametrize("form", [None, "int8", "int4"])
def test_experts(dtype, form):
    """Each row goes to one of two experts; the other expert has rows of its own, as many as there are."""
    weight = torch.randn(2, 24, 64, device=DEVICE) / 8
    if form is None:
        grouped, matrix = chosen("grouped_linear", dtype), weight.to(dtype)
    else:
        grouped = chosen("grouped_quantized_linear", dtype)
        matrix = quantize.reference(weight.flatten(0, 1), 8 if form == "int8" else 4, 32)

    def product(x: Tensor) -> Tensor:
        out = grouped(torch.cat([x[:2], x]), matrix, None, torch.tensor([0, len(x[:2]), len(x[:2]) + len(x)]))
        return out[len(x[:2]) :]

    check(product, torch.randn(ROWS, 64, device=DEVICE).to(dtype), alone=(0, 129))


@pytest.mark.sampled(2)
@each_dtype
def test_combining_experts(dtype):
    combine, top_k, dim = chosen("combine_experts", dtype), 6, 90

    def function(x: Tensor) -> Tensor:
        out, weights = x[:, top_k:].reshape(-1, dim), x[:, :top_k].float()
        order = torch.randperm(len(out), device=DEVICE)
        return combine(out[order], order, weights)

    check(function, torch.randn(FEW_ROWS, top_k * (dim + 1), device=DEVICE).to(dtype), alone=(0, 66))


@pytest.mark.sampled(2)
@each_dtype
def test_norms(dtype):
    weight = torch.randn(100, device=DEVICE).to(dtype)
    norm, add_norm = chosen("rms_norm", dtype), chosen("add_rms_norm", dtype)
    x = torch.randn(FEW_ROWS, 100, device=DEVICE).to(dtype)
    check(lambda x: norm(x, weight, 1e-6), x, alone=(0, 66))
    check(lambda x: add_norm(x, x.clone(), weight, 1e-6)[0], x, alone=(0, 66))


@pytest.mark.sampled(2)
@each_dtype
def test_sums_of_rows(dtype):
    x = torch.randn(FEW_ROWS, 77, device=DEVICE).to(dtype)
    for name in ("row_sums", "log_softmax"):
        check(chosen(name, dtype), x, alone=(0, 66))


@pytest.mark.slow
def test_samples():
    rows, vocab = 7, 100
    logits, positions = torch.randn(rows, vocab, device=DEVICE), torch.arange(rows, device=DEVICE)
    keep, sample = chosen("keep_top_k_top_p", torch.float32), chosen("sample_gumbel", torch.float32)

    def draw(x: Tensor) -> Tensor:
        position = x[:, vocab].long()
        kept = keep(x[:, :vocab].contiguous(), torch.full_like(position, 20), torch.full_like(x[:, 0], 0.9))
        return sample(kept, position * 77, position)[:, None]

    check(draw, torch.cat([logits, positions[:, None].float()], 1), alone=(0, 6))
