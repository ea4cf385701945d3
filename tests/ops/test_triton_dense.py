"""Dense products in Triton, whose bits do not depend on the number of rows, under Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from quire.ops.reference.elementwise import combine_experts, linear, linear_by_head
from quire.ops.triton import dense
from quire.ops.triton.targets import INTERPRETED
from quire.platform.gpu.cards import CARDS

pytestmark = pytest.mark.usefixtures("interpreter")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SAMPLED = [pytest.param(dtype, marks=pytest.mark.sampled(5)) for dtype in (torch.float16, torch.bfloat16)]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, *SAMPLED], ids=str)


def draw(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(DEVICE, dtype)


def close(product: Tensor, wanted: Tensor) -> None:
    """To within the rounding of the result, as sums are in float32."""
    assert (product.dtype, product.shape) == (wanted.dtype, wanted.shape)
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-6}[product.dtype]
    torch.testing.assert_close(product.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.sampled(3)), 132], ids=["whole", "parts"])
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """With one processor, a sum is not divided. With many, it is, and each program computes one part."""
    card = CARDS["sm_90"].__class__(**{**vars(CARDS["sm_90"]), "processors": request.param})
    monkeypatch.setattr(dense, "card_of", lambda device: card)
    return int(request.param)


@pytest.mark.sampled(18)
@each_dtype
@pytest.mark.parametrize(("ins", "outs"), [(64, 130), (33, 7), (1100, 20)])
def test_linear(dtype, ins, outs, processors):
    weight, bias = draw(dtype, outs, ins) / ins**0.5, draw(dtype, outs)
    for rows in (0, 5, 131):
        x = draw(dtype, rows, ins)
        for added in (bias, None) if rows == 5 else (bias,):
            wanted = linear.reference(x.float(), weight.float(), None if added is None else added.float())
            close(dense.linear_triton(x, weight, added), wanted.to(dtype))


@pytest.mark.sampled(3)
@each_dtype
def test_linear_with_any_strides(dtype):
    x, weight = draw(dtype, 20, 3 * 40), draw(dtype, 90, 2 * 40) / 8
    for view in (x[:, 40:80], x[::2, :40], x.t().contiguous().t()[:, 80:], x[:, ::3]):
        for matrix in (weight[:, 40:], weight[::2, :40], weight.t().contiguous().t()[:, :40], weight[:, ::2]):
            wanted = linear.reference(view.float(), matrix.float(), None)
            close(dense.linear_triton(view, matrix, None), wanted.to(dtype))


@pytest.mark.sampled(6)
@each_dtype
def test_linear_by_head(dtype, processors):
    for tokens, heads, ins, outs in ((0, 2, 16, 16), (1, 3, 32, 48), (7, 2, 33, 5), (40, 4, 128, 64)):
        weight = draw(dtype, heads, outs, ins) / ins**0.5
        x = draw(dtype, tokens, heads, ins + 8)
        for view in (x[..., :ins], x.transpose(0, 1).contiguous().transpose(0, 1)[..., 8:]):
            wanted = linear_by_head.reference(view.float(), weight.float())
            close(dense.linear_by_head_triton(view, weight), wanted.to(dtype))


@pytest.mark.sampled(3)
@each_dtype
def test_combining_experts(dtype):
    for tokens, top_k, dim in ((0, 2, 16), (1, 1, 5), (3, 8, 33), (20, 4, 1100)):
        out, order = draw(dtype, tokens * top_k, dim), torch.randperm(tokens * top_k, device=DEVICE)
        weights = torch.rand(tokens, top_k, device=DEVICE)
        wanted = combine_experts.reference(out.float(), order, weights.to(dtype).float())
        close(dense.combine_experts_triton(out, order, weights), wanted.to(dtype))


def test_few_rows_keep_the_processors_of_a_card_busy():
    """Shapes of Llama-3-8B: the output of attention, the MLP's first and second product, the language-model head."""
    for card in (CARDS["sm_80"], CARDS["sm_90"], CARDS["sm_100"]):
        for outs, ins in ((4096, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096)):
            tiles = outs // 128
            part = dense._part(tiles, ins, 64, card.processors)
            programs = tiles * -(-ins // part)
            waves = -(-programs // card.processors)
            assert programs / waves >= 0.75 * card.processors
            assert part % 64 == 0
