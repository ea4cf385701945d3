"""On a CPU, a row has the same result bit for bit, whatever other rows there are, with any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.layers.mlp import activation
from quire.ops import Kernels, Target
from quire.ops.cpu import build
from quire.ops.reference.quantized import QuantizedMatrix

CPU = torch.device("cpu")
ROWS = 200
Function = Callable[[Tensor], Tensor]  # of [rows, ...] by rows


@pytest.fixture(
    params=[
        "float32",
        "bfloat16",
        pytest.param("float16", marks=pytest.mark.sampled(5)),
        *(pytest.param(f"{name} avx2", marks=pytest.mark.slow) for name in ("float32", "bfloat16", "float16")),
    ]
)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Kernels for a dtype, and for AVX2 alone if the parameter says so."""
    dtype, *instruction_set = request.param.split()
    try:
        build.choose_instruction_set(*instruction_set or ["native"])
    except ValueError as error:
        pytest.skip(str(error))
    if build.library() is None:
        build.choose_instruction_set("native")
        pytest.skip("the CPU kernels cannot be compiled here")
    torch.manual_seed(0)
    yield Kernels(Target(CPU, getattr(torch, dtype)))
    build.choose_instruction_set("native")


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(function: Function, x: Tensor, what: str) -> None:
    torch.set_num_threads(1)
    alone = torch.cat([function(x[i : i + 1]) for i in range(len(x))])
    assert torch.isfinite(alone.float()).all()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        for start, stop in ((0, 2), (1, 6), (3, 20), (0, 65), (7, len(x)), (0, len(x))):
            got = function(x[start:stop].clone())
            different = (got != alone[start:stop]).flatten(1).any(1).sum().item()
            assert different == 0, f"{what}: {different} of {stop - start} rows differ with {threads} threads"


def test_linear_layers(kernels: Kernels) -> None:
    dtype = kernels.target.dtype
    for inner, outer in ((512, 700), (96, 33), (2049, 130)):
        weight, bias = (torch.randn(outer, inner) / inner**0.5).to(dtype), torch.randn(outer).to(dtype)
        packed = kernels.linear.pack(weight)  # type: ignore[attr-defined]
        check(lambda x, w=packed, b=bias: kernels.linear(x, w, b), torch.randn(ROWS, inner).to(dtype), f"{inner}")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("form", ["int8", "int4", "fp8", "fp8 by row", "table"])
def test_quantized_layers(kernels: Kernels, form: str) -> None:
    dtype = kernels.target.dtype
    weight = torch.randn(300, 512) / 20
    group = 128 if form == "fp8" else 512
    matrix = QuantizedMatrix(weight.to(torch.float8_e4m3fn), torch.ones(300, 512 // group), group, 512)
    if not form.startswith("fp8"):
        matrix = kernels.quantize(weight, 8 if form == "int8" else 4, 32)
    if form == "table":
        matrix = replace(matrix, table=tuple(torch.randn(16).tolist()))
    function = kernels.quantized_linear
    packed = function.pack(matrix) if hasattr(function, "pack") else matrix
    check(lambda x: function(x, packed, None), torch.randn(ROWS, 512).to(dtype), form)


def test_experts(kernels: Kernels) -> None:
    """From experts with one row to experts with many."""
    dtype = kernels.target.dtype
    weight = (torch.randn(4, 96, 200) / 14).to(dtype)

    def product(x: Tensor) -> Tensor:
        made = kernels.grouped_linear(torch.cat([x] * 4), weight, None, torch.arange(5) * len(x))
        return made.unflatten(0, (4, len(x))).transpose(0, 1)

    check(product, torch.randn(ROWS, 200).to(dtype), "grouped_linear")


def test_adapters(kernels: Kernels) -> None:
    """A token's adapter is given by its first input, so that it moves with its row."""
    dtype = kernels.target.dtype
    a, b = (torch.randn(3, 2, 20, 600) / 24).to(dtype), (torch.randn(3, 20, 700) / 4).to(dtype)
    ranks, bounds = torch.tensor([20, 0, 13]), torch.tensor([0, 300, 700])

    def product(x: Tensor) -> Tensor:
        slots = (x[:, 0].float().abs() * 100).long() % 4 - 1
        return kernels.add_lora(torch.ones(len(x), 700, dtype=dtype), x, a, b, slots, ranks, bounds)

    check(product, torch.randn(ROWS, 600).to(dtype), "add_lora")


def test_combining_experts(kernels: Kernels) -> None:
    dtype, top_k = kernels.target.dtype, 8

    def combine(x: Tensor) -> Tensor:  # x: [tokens, top_k * (700 + 1)], what experts made and their weights
        made, weights = x[:, top_k:].reshape(-1, 700), x[:, :top_k].float()
        order = torch.randperm(len(made))
        return kernels.combine_experts(made[order], order, weights)

    check(combine, torch.randn(ROWS, top_k * 701).to(dtype), "combine_experts")


def test_maps_of_latent_attention(kernels: Kernels) -> None:
    dtype = kernels.target.dtype
    weight = (torch.randn(3, 80, 64) / 8).to(dtype)
    check(lambda x: kernels.linear_by_head(x, weight), torch.randn(ROWS, 3, 64).to(dtype), "linear_by_head")


@pytest.mark.sampled(3)
def test_activations_and_norms(kernels: Kernels) -> None:
    dtype = kernels.target.dtype
    for width in (24, 1003, 2048):
        x = 3 * torch.randn(ROWS, 2 * width).to(dtype)
        for name in ("silu", "gelu", "gelu_tanh", "swiglu_oai", "limited_swiglu", "swiglu_step", "relu", "relu2"):
            check(activation(kernels, name, gated=True), x, f"{name} gated")
            if "swiglu" not in name:
                check(activation(kernels, name, gated=False), x, name)
        check(lambda x: kernels.activate(x, "sigmoid"), x, "sigmoid")
        check(lambda x: kernels.activate(x, "tanh"), x, "tanh")
        check(kernels.row_sums, x, "row_sums")
        weight = torch.randn(2 * width).to(dtype)
        check(lambda x, w=weight: kernels.rms_norm(x, w, 1e-6), x, "rms_norm")


def test_what_surrounds_a_scan_with_removal(kernels: Kernels) -> None:
    """The rows have all that belongs to a token, so that it moves with it."""
    dtype, heads, dim = kernels.target.dtype, 3, 33
    own, bonus, n = torch.randn(6, 1, heads * dim), torch.randn(heads * dim), heads * dim

    def mixed(x: Tensor) -> Tensor:
        return kernels.lerp(x[:, :n], x[:, n : 2 * n], own).transpose(0, 1)

    def keys(x: Tensor) -> Tensor:
        r, k, read, decay, rate = x.split(n, 1)
        return torch.cat(kernels.removal_keys(r, k, read.unflatten(1, (heads, dim)), decay, rate, own[0, 0], bonus), 1)

    def ends(x: Tensor) -> Tensor:
        y, v, gate, sums = x[:, : 3 * n + heads].split([n, n, n, heads], 1)
        return kernels.add_bonus(y.reshape(-1, dim), own[0, 0], bonus, sums.float().reshape(-1, 1), v, gate)

    for function in (mixed, keys, ends):
        check(function, torch.randn(ROWS, 5 * n).to(dtype), function.__name__)


def test_what_torch_computes(kernels: Kernels) -> None:
    """A layer norm, a router's softmax and choice, log-probabilities, a soft cap: these are torch's own."""
    dtype, functional = kernels.target.dtype, torch.nn.functional
    for width in (60, 128, 1000):
        x = 3 * torch.randn(ROWS, width).to(dtype)
        weight = torch.randn(width).to(dtype)
        check(lambda x, w=weight: functional.layer_norm(x, w.shape, w, w, 1e-5), x, "layer_norm")
        check(lambda x: x.log_softmax(-1, torch.float32), x, "log_softmax")
        check(lambda x: x.float().softmax(-1), x, "softmax")
        check(lambda x: x.float().softmax(-1).topk(8, dim=-1).indices, x, "topk")
        check(lambda x: x.float()[:, :8].square().sum(-1, keepdim=True), x, "sum")
        check(lambda x: torch.tanh(x / 30) * 30, x, "tanh")
    heads = torch.randn(ROWS, 8, 64)
    check(lambda x: x.square().sum((-2, -1), keepdim=True), heads, "the squares of all heads")
