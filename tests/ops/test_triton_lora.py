"""Adapters in Triton, under Triton's interpreter: as the reference computes them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
import torch

from quire.ops.reference.lora import add_lora
from quire.ops.triton.lora import add_lora_triton
from quire.ops.triton.targets import INTERPRETED

pytestmark = pytest.mark.usefixtures("interpreter")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@pytest.mark.slow
@pytest.mark.sampled(15)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(dtype, marks=pytest.mark.sampled(5)) for dtype in (torch.float16, torch.bfloat16))],
    ids=str,
)
@pytest.mark.parametrize(
    ("tokens", "ins", "widths", "rank"),
    [(0, 16, (16,), 4), (1, 64, (96,), 16), (5, 33, (7, 1), 1), (17, 300, (40, 24, 60), 5), (70, 64, (150, 48), 33)],
)
def test_adapters(dtype, tokens, ins, widths, rank):
    torch.manual_seed(tokens)
    a = (torch.randn(4, len(widths), rank, ins, device=DEVICE) / ins**0.5).to(dtype)
    b = (torch.randn(4, rank, sum(widths), device=DEVICE) / rank**0.5).to(dtype)
    ranks = torch.tensor([rank, rank, max(rank - 3, 0), 0], device=DEVICE)
    bounds = torch.tensor([0, *widths], device=DEVICE).cumsum(0)
    x, out = torch.randn(tokens, 3 * ins, device=DEVICE), torch.randn(tokens, 2 * sum(widths), device=DEVICE)
    x, out = x.to(dtype)[:, ins : 2 * ins], out.to(dtype)[:, sum(widths) :]
    for slots in (torch.randint(-1, 4, (tokens,), device=DEVICE), torch.ones(tokens, dtype=torch.int64, device=DEVICE)):
        wanted = add_lora.reference(out.clone().float(), x.float(), a.float(), b.float(), slots, ranks, bounds)
        got = out.clone()
        assert add_lora_triton(got, x, a, b, slots, ranks, bounds) is got
        tolerance = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
        torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance)
        assert torch.equal(got[slots == -1], out[slots == -1])
