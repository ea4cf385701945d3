"""The kernels for GGUF's blocks give what the readable decoders give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.checkpoints.formats.gguf import decoder_of
from quire.checkpoints.formats.gguf_types import TYPES
from quire.ops.cpu.build import library
from quire.ops.cpu.gguf_blocks import _LAYOUTS, can_decode, decode_blocks, put_values

pytestmark = pytest.mark.skipif(library() is None, reason="the CPU kernels cannot be compiled here")

KINDS = {kind.name: kind for kind in TYPES.values() if kind.name in _LAYOUTS}
SHAPES = [(7, 3), (1, 1), (300, 5)]


def blocks(name: str, shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (*shape, KINDS[name].nbytes), dtype=torch.uint8, generator=generator)


def reference(name: str, data: torch.Tensor):
    decoder = decoder_of(KINDS[name])
    assert not isinstance(decoder, torch.dtype)
    return decoder(data)


def check_parts(name: str, shape: tuple[int, int]) -> None:
    data = blocks(name, shape)
    made, expected = decode_blocks(name, data), reference(name, data)
    for field in ("group", "in_features", "code_bits", "bits", "order", "table"):
        assert getattr(made, field) == getattr(expected, field), field
    for field in ("codes", "scales", "offsets", "factors"):
        one, other = getattr(made, field), getattr(expected, field)
        assert (one is None) == (other is None)
        if other is not None:
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one.numpy(), other.numpy())  # NaNs among them


def check_values(name: str, dtype: torch.dtype) -> None:
    data = blocks(name, (30, 4))
    for factor, shift in ((1.0, 0.0), (0.3, -1.0)):
        expected = (reference(name, data).dequantize() * factor + shift).to(dtype)
        made = torch.empty(expected.shape, dtype=dtype)
        put_values(name, data, factor, shift, made)
        np.testing.assert_array_equal(made.float().numpy(), expected.float().numpy())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_parts_are_those_of_the_readable_decoder(name, shape):
    assert can_decode(name, blocks(name, shape))
    check_parts(name, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", KINDS)
def test_values_are_those_of_the_readable_decoder(name, dtype):
    check_values(name, dtype)


def test_types_without_a_kernel_have_the_readable_decoder():
    assert {"IQ4_NL", "MXFP4", "TQ1_0"} <= {kind.name for kind in TYPES.values()} - KINDS.keys()
    assert not can_decode("MXFP4", torch.empty(0, dtype=torch.uint8))
    assert not can_decode("Q4_0", torch.empty(0, dtype=torch.uint8, device="meta"))
