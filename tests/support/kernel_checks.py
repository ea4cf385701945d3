"""Every CPU kernel of a library against the references, on small shapes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention.test_attention import MIXED, Kept, World
from attention.test_attention import build as build_attention
from attention.test_prepare import both_ways
from attention.test_sparse import SparseWorld
from ops.test_count_kept import check_count_kept
from ops.test_encoder_attention import drawn, formula
from ops.test_gguf_blocks import KINDS, check_parts, check_values
from ops.test_ops import CASES, as_tuple, check_float16, check_packed_products, copied
from ops.test_quantized import (
    check_extreme_products,
    check_joined_experts,
    check_packed_experts,
    check_products,
    check_quantizing,
    check_values_of_float8,
)
from ops.test_states import SHAPES, Texts, check_gated_norm, kernels

import quire
from quire.attention.base import AttentionShape
from quire.attention.cpu import CpuAttention
from quire.ops import OPS
from quire.ops.cpu import build, linear, quantized_linear

_CASES_OF_AN_OP = 10  # at least, if it has so many
_OTHERS = {  # those between processes, and what computes nothing
    "quire_reduce",
    "quire_gather",
    "quire_replay",
    "quire_advise_huge_pages",
}


def implementation(name: str) -> Any:
    return next(i.function for i in OPS[name].implementations if i.name == "cpu")


def check_against_references(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """library: a build.Library or what has its method `function`."""
    called: set[str] = set()

    @cache
    def function(name: str, arguments: str) -> Callable[..., None]:
        called.add(name)
        return library.function(name, arguments)

    monkeypatch.setattr(build, "_kernel", function)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        _check_attention(dtype)
        _check_ops(dtype)
        _check_states(dtype)
        check_packed_experts(dtype)
        for kind in KINDS:
            check_values(kind, dtype)
    for kind in KINDS:
        check_parts(kind, (7, 3))
    for dtype in (torch.bfloat16, torch.float16):
        check_packed_products(linear.linear_cpu, dtype)
    check_products(quantized_linear.quantized_linear_cpu)
    check_extreme_products(quantized_linear.quantized_linear_cpu)
    check_joined_experts((150, 1, 90))
    check_float16(implementation("multiply"))
    check_values_of_float8(quantized_linear.quantized_linear_cpu)
    check_quantizing(quantized_linear.quantize_cpu)
    check_count_kept(implementation("count_kept"), seed=0)
    sources = "".join(path.read_text() for path in Path(quire.__file__).parent.rglob("*.py"))
    unchecked = set(re.findall(r'\bkernel\(\s*"(quire_\w+)"', sources)) - called - _OTHERS
    assert not unchecked, f"kernels without a check: {sorted(unchecked)}"


def _check_attention(dtype: torch.dtype) -> None:
    shape = AttentionShape(14, 2, 80, 16, dtype, torch.device("cpu"))
    World(CpuAttention(shape), MIXED).check()
    World(CpuAttention(shape), MIXED).check(window=16, soft_cap=5.0, sinks=torch.randn(14), bias=torch.randn(14, 41))
    latent = replace(shape, num_kv_heads=1, head_dim=40, value_dim=32)
    World(CpuAttention(latent), MIXED).check()
    ours = SimpleNamespace(rms_norm=implementation("rms_norm"), rotary_embedding=implementation("rotary_embedding"))
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    cells = (None, torch.int8, torch.float8_e4m3fn, *[torch.float16] * (dtype is torch.float32))
    for cell in cells:
        kept = Kept(dtype, cell)
        if cell is not None:
            World(CpuAttention(replace(shape, cell=cell)), MIXED).check()
        SparseWorld(CpuAttention, kept, [(0, 1), (40, 1), (0, 33), (90, 7)]).check(tolerance)
        for rotary in ("halves", "pairs"):
            world = World(build_attention(CpuAttention, 6, 2, 48, 32, kept), [(3, 20), (0, 16), (40, 1)])
            for made, wanted in both_ways(world, ours, "float32", rotary):
                assert torch.equal(made.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
    starts = torch.tensor([0, 1, 40, 105]).int()
    q, k, v = drawn(dtype, 105, 4, 2, 24)
    for reach, bias in ((None, None), (20, None), (None, torch.randn(4, 41))):
        made = implementation("encoder_attention")(q, k, v, starts, 0.2, reach, bias)
        wanted = formula(q, k, v, starts, 0.2, reach, bias)
        torch.testing.assert_close(made.double(), wanted, rtol=tolerance, atol=tolerance)


def _check_ops(dtype: torch.dtype) -> None:
    for name, all_cases in CASES.items():
        cases = [case for case in all_cases(dtype) if case[0].numel() > 0]
        for implementation in (i for i in OPS[name].implementations if i.name == "cpu"):
            for arguments in cases[:: max(1, len(cases) // _CASES_OF_AN_OP)]:
                made, wanted = (f(*map(copied, arguments)) for f in (implementation.function, OPS[name].reference))
                for a, b in zip(as_tuple(made), as_tuple(wanted), strict=True):
                    # A sum that is nearly zero has the rounding errors of its terms, which are as large as other sums.
                    largest = float(b.abs().max()) if b.is_floating_point() else 1.0
                    rtol = 1e-5 if dtype is torch.float32 else 2**-6
                    torch.testing.assert_close(a, b, rtol=rtol, atol=1e-5 * min(max(largest, 1.0), 4.0))


def _check_states(dtype: torch.dtype) -> None:
    names = ("causal_conv", "time_steps", "bounded_decays", "scan", "selective_scan", "gated_norm")
    ours = SimpleNamespace(**{name: implementation(name) for name in names})
    for shape in SHAPES.values():
        made, wanted = (Texts(shape, [1, 9, 20], 3, dtype).whole(chosen) for chosen in (ours, kernels(dtype, True)))
        for a, b in zip(made, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5 if dtype is torch.float32 else 2e-2, atol=1e-5)
    for options in ((True, "silu"), (False, "sigmoid")):
        check_gated_norm(ours, dtype, options, 12, 2e-2)
    x = (torch.randn(9, 40) * 4).to(dtype)[:, :37]
    bias, rate = torch.randn(37), torch.randn(37)
    decays = [chosen.bounded_decays(x, bias, rate, -5.0) for chosen in (ours, kernels(dtype, True))]
    torch.testing.assert_close(*decays)
