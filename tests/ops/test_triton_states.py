"""The GPU's kernels of recurrent layers against their definition, in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from support.triton_kernels import INSTALLED, interpreter  # noqa: F401

if not INSTALLED:
    pytest.skip("Triton is not installed", allow_module_level=True)

from test_states import BLOCK_SIZE, SHAPES, Texts, check_gated_norm, kernels

from quire.ops.triton import convolution, states

pytestmark = pytest.mark.usefixtures("interpreter")
KERNELS = SimpleNamespace(
    causal_conv=convolution.causal_conv,
    time_steps=convolution.time_steps,
    bounded_decays=convolution.bounded_decays,
    scan=states.scan,
    gated_norm=states.gated_norm,
    selective_scan=states.selective_scan,
)


@pytest.mark.sampled(12)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_texts_in_steps_with_rejected_drafts(name, dtype):
    """Three texts at once: in chunks across blocks, one token at a time, and with drafts of which some are rejected."""
    lengths, drafts = [20, 9, 1], 2
    expected = Texts(SHAPES[name], lengths, drafts, dtype).whole(kernels(dtype, reference=True))
    texts = Texts(SHAPES[name], lengths, drafts, dtype)
    real = [x.clone() for x in texts.x]
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 1e-2}
    steps = [
        ([(0, 0, 11), (1, 0, BLOCK_SIZE)], 0),
        ([(0, 11, 14), (2, 0, 1)], 2),
        ([(0, 12, 15)], 1),
        ([(0, 14, 16)], 0),
        ([(0, 16, 17), (1, 8, 9)], 0),
        ([(0, 17, 20)], 0),
    ]
    for spans, wrong in steps:
        text, start, end = spans[0]
        texts.x[text] = real[text].clone()
        texts.x[text][end - wrong : end] += 1
        made = texts.step(KERNELS, spans)
        for place, ((text, start, end), out) in enumerate(zip(spans, made, strict=True)):
            right = end - (wrong if place == 0 else 0)
            torch.testing.assert_close(out[: right - start], expected[text][start:right], **close)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [(True, "silu"), (False, "silu"), (False, "sigmoid")])
@pytest.mark.parametrize("size", [24, 12, None])
def test_gated_norms(dtype, options, size):
    check_gated_norm(KERNELS, dtype, options, size, 3e-2)


def test_time_steps():
    x, bias, rate = torch.randn(7, 5) * 10, torch.randn(5), torch.randn(5)
    made, expected = (k.time_steps(x, bias, rate, 0.01, 5.0) for k in (KERNELS, kernels(torch.float32, True)))
    torch.testing.assert_close(made, expected)


def test_bounded_decays():
    x, bias, rate = torch.randn(7, 5) * 10, torch.randn(5), torch.randn(5)
    made, expected = (k.bounded_decays(x, bias, rate, -5.0) for k in (KERNELS, kernels(torch.float32, True)))
    torch.testing.assert_close(made, expected)
