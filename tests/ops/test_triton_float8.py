"""Conversion of float8 by integer arithmetic against torch's, bit for bit."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
import torch
import triton
import triton.language as tl

from quire.ops.triton.float8 import from_float8, to_float8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _decode(codes, out, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, from_float8(tl.load(codes + at), out.dtype.element_ty, False))


def _encode(x, out, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, to_float8(tl.load(x + at), False))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_all_codes_have_the_values_that_torch_gives_them(dtype):
    codes = torch.arange(256, device=DEVICE).to(torch.uint8)
    values = torch.empty(256, dtype=dtype, device=DEVICE)
    triton.jit(_decode)[(1,)](codes, values, 256)
    wanted = codes.view(torch.float8_e4m3fn).to(dtype)
    assert torch.equal(values.nan_to_num(1000.0), wanted.nan_to_num(1000.0))
    assert torch.equal(values.signbit()[:127], wanted.signbit()[:127])
    assert torch.equal(values.signbit()[128:255], wanted.signbit()[128:255])


@pytest.mark.usefixtures("interpreter")
def test_floats_are_rounded_as_torch_rounds_them():
    """Random floats of all magnitudes; each code's value, the ties between neighbours, and the floats next to them."""
    torch.manual_seed(0)
    values = torch.arange(127).to(torch.uint8).view(torch.float8_e4m3fn).double()
    ties = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([464.0, 480.0])]).float()
    beside = [torch.nextafter(ties, torch.tensor(limit)) for limit in (torch.inf, -torch.inf)]
    random = torch.randn(2000) * 2.0 ** torch.randint(-20, 12, (2000,))
    x = torch.cat([ties, *beside, random, torch.tensor([1e30, torch.inf, 2.0**-149, 0.0])])
    x = torch.cat([x, -x, torch.zeros(-2 * len(x) % 128)]).to(DEVICE)
    codes = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    encode = triton.jit(_encode)
    encode[(len(x) // 128,)](x, codes, 128)
    assert torch.equal(codes, x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    nan = torch.full((128,), torch.nan, device=DEVICE)
    encode[(1,)](nan, codes, 128)
    assert codes[:128].view(torch.float8_e4m3fn).isnan().all()
