"""Recorded kernels: replayed on other numbers, and what cannot be recorded is noticed."""

from __future__ import annotations

import pytest
import torch

from quire.ops.cpu.build import library
from quire.ops.cpu.recording import Arena, Recording
from quire.ops.reference.quantized import QuantizedMatrix
from quire.ops.registry import Kernels, Target

if library() is None:
    pytest.skip("the CPU kernels cannot be compiled here", allow_module_level=True)

KERNELS = Kernels(Target(torch.device("cpu"), torch.bfloat16))


def draw(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


@torch.inference_mode()
def test_a_recording_repeats_its_kernels_on_what_its_memory_then_holds():
    weight, norm = KERNELS.linear.pack(draw(96, 64, seed=1)), draw(64, seed=2)
    codes = draw(48, 40, seed=3).to(torch.float8_e4m3fn)
    float8 = KERNELS.quantized_linear.pack(QuantizedMatrix(codes, torch.ones(48, 1), 40, 40))

    def compute(x: torch.Tensor) -> torch.Tensor:
        normed = KERNELS.rms_norm(x, norm, 1e-6)
        gated = KERNELS.silu_and_mul(KERNELS.linear(normed, weight, None)[:, :80])
        return KERNELS.quantized_linear(gated, float8, None)

    x = draw(5, 64)
    with Recording(Arena()) as recording:
        made = compute(x)
    assert recording.obstacle is None
    assert torch.equal(made, compute(x))
    for seed in (3, 4):
        x.copy_(draw(5, 64, seed=seed))
        recording.replay()
        assert torch.equal(made, compute(x))


OBSTACLES = {
    "an operation of torch": (lambda x: x + 1, "aten::add"),
    "one that overwrites": (lambda x: x.mul_(2), "aten::mul_"),
    "a view that has to be copied": (lambda x: x.t().reshape(-1), "aten::reshape"),
    "another type": (lambda x: x.float(), "aten::to"),
    "a value": (lambda x: x[0, 0].item(), "aten::item"),
    "values": (lambda x: x.tolist(), "aten::resolve_conj"),
    "a kernel without a form to record": (lambda x: KERNELS.argmax(x), "quire_argmax"),
}


@pytest.mark.parametrize("what", OBSTACLES)
@torch.inference_mode()
def test_what_cannot_be_repeated_is_an_obstacle(what):
    function, name = OBSTACLES[what]
    x, weight = draw(4, 16), draw(16)
    with Recording(Arena()) as recording:
        function(x)
        KERNELS.rms_norm(x, weight, 1e-6).sum()
    assert recording.obstacle == name


@torch.inference_mode()
def test_views_and_new_tensors_are_none():
    with Recording(Arena()) as recording:
        x = torch.empty(4, 16, dtype=torch.bfloat16)
        x.new_empty(3, 5), torch.empty_like(x), torch.empty_like(x, dtype=torch.float32)
        first, _ = x.chunk(2, dim=-1)
        x.view(2, 2, 16)[:, :1].unsqueeze(0).expand(3, 2, 1, 16), x.contiguous(), x.to(torch.bfloat16), first[..., 2:]
    assert recording.obstacle is None


def test_calls_outside_are_not_recorded():
    x, weight = draw(4, 16), draw(16)
    with Recording(Arena()) as recording:
        KERNELS.rms_norm(x, weight, 1e-6)
    x = draw(4, 16, seed=5)
    made = KERNELS.rms_norm(x, weight, 1e-6)
    kept = made.clone()
    x.zero_()
    recording.replay()
    assert torch.equal(made, kept)


def test_an_arena_lends_memory_again_when_the_last_view_of_it_is_gone():
    arena = Arena()
    first = arena.empty((8, 1000), torch.float32)
    assert (first.shape, first.dtype, first.data_ptr() % 64) == ((8, 1000), torch.float32, 0)
    address, view = first.data_ptr(), first.view(-1)[100:]
    del first
    second = arena.empty((4, 2000), torch.bfloat16)  # needs as much, were it free
    other = arena.empty((8, 999), torch.float32)
    assert address not in (second.data_ptr(), other.data_ptr())
    del view
    assert arena.empty((16, 500), torch.float32).data_ptr() == address
    assert arena.empty((0, 5), torch.int64).shape == (0, 5)
