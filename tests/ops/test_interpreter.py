"""What the tests change in Triton's interpreter: addresses are checked, and numbers are those of a GPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from quire.ops.triton.targets import INTERPRETED
from quire.platform.gpu.cards import CARDS, card_of
from support import ptx
from support.triton_kernels import posing

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.skipif(not INTERPRETED, reason="these kernels run on the card"),
]


def _copy(out, x, size, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(out + at, tl.load(x + at, mask=at < size, other=0.0), mask=at < size)


def _sum(out, x, dtype: tl.constexpr):
    at = tl.arange(0, 16)
    tl.store(out + at, (tl.load(x + at) * 1.0 + 0.001953125).to(dtype))


def _product(out, a, b, block: tl.constexpr):
    at = tl.arange(0, block)
    square = at[:, None] * block + at[None, :]
    sums = tl.zeros([block, block], out.dtype.element_ty)
    tl.store(out + square, tl.dot(tl.load(a + square), tl.load(b + square), sums, out_dtype=sums.dtype))


def test_addresses_outside_of_a_tensor_are_found_even_within_its_storage():
    copy = triton.jit(_copy)
    x = torch.arange(64.0)
    out = torch.zeros(16)
    copy[(1,)](out, x[8:24], 16, 16)
    assert torch.equal(out, x[8:24])
    with pytest.raises(InterpreterError, match=r"load of 1 addresses outside of a tensor.*bytes 60 to 64 of 60"):
        copy[(1,)](out, x[8:23], 16, 16)
    with pytest.raises(InterpreterError, match="store of 4 addresses outside of a tensor"):
        copy[(1,)](out[:12], x, 16, 16)
    copy[(1,)](out[:12], x, 12, 16)  # a mask hides the others


def test_bfloat16_is_computed_and_rounded_as_by_torch():
    x = torch.linspace(-3, 3, 16).bfloat16()
    out = torch.empty_like(x)
    triton.jit(_sum)[(1,)](out, x, tl.bfloat16)
    assert torch.equal(out, x + 0.001953125)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16], ids=str)
def test_products_are_exact(dtype):
    a, b = torch.randint(-100, 100, (2, 32, 32), generator=torch.Generator().manual_seed(0)).to(dtype)
    out = torch.empty(32, 32, dtype=torch.int32 if dtype is torch.int8 else torch.float32)
    triton.jit(_product)[(1,)](out, a, b, 32)
    assert torch.equal(out.double(), a.double() @ b.double())


def test_the_interpreter_can_pose_as_any_card():
    for card in CARDS.values():
        for _ in posing(card):
            found = card_of(torch.device("cpu"))
            assert (found.capability, found.processors) == (card.capability, card.processors)
    assert card_of(torch.device("cpu")).processors != CARDS["sm_120"].processors


def test_ptx():
    """The examples of NVIDIA's manual for prmt and lop3: a & b & c, a | b | c, a & b & ~c, (a & b | c) ^ a."""
    a, b, c = (np.array([word], dtype=np.uint32) for word in (0x33221100, 0x77665544, 0x0F0F1234))

    def run(line: str) -> int:
        return int(ptx.run(f"{{ .reg .b32 t; {line} }}", [a, b, c], 1)[0][0])

    assert run("prmt.b32 $0, $1, $2, 0x7531;") == 0x77553311
    assert run("prmt.b32 t, $1, 0, 0x4140; mov.b32 $0, t;") == 0x00110000
    assert run("lop3.b32 $0, $1, $2, $3, 0x80;") == int((a & b & c)[0])
    assert run("lop3.b32 $0, $1, $2, $3, 0xFE;") == int((a | b | c)[0])
    assert run("lop3.b32 $0, $1, $2, $3, 0x40;") == int((a & b & ~c)[0])
    assert run("lop3.b32 $0, $1, $2, $3, 0x1A;") == int((((a & b) | c) ^ a)[0])
    one, two = 0x3F803F80, 0x40004000
    assert run(f"fma.rn.bf16x2 $0, {two}, {two}, {one};") == 0x40A040A0
    with pytest.raises(NotImplementedError, match="mad"):
        run("mad.lo.u32 $0, $1, $2, $3;")
