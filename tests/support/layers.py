"""Single layers with random weights, and the checkpoint tensors that filled them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from quire.layers.build import Builder, WeightSlot
from quire.layers.linear import DenseWeight
from quire.ops import OPS, Kernels, Target
from quire.ops.cpu.build import library
from quire.parallel.experts import ExpertRanks
from quire.parallel.mesh import Communicator
from support.thread_group import on_every_rank

Layer = TypeVar("Layer")
Tensors = dict[str, Tensor]


def draw(name: str, *shape: int) -> Tensor:
    """Normally distributed values that depend only on the name."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def build_layer(
    make: Callable[[Builder], Layer],
    kernels: str = "reference",
    group: Communicator | None = None,
    experts: ExpertRanks | None = None,
) -> tuple[Layer, Tensors]:
    """Returns the layer, and its whole tensors by checkpoint name."""
    if kernels == "cpu" and library() is None:
        pytest.skip("the CPU kernels cannot be compiled here")
    pins = dict.fromkeys(OPS, "reference") if kernels == "reference" else {}
    chosen = Kernels(Target(torch.device("cpu"), torch.float32), pins)
    builder = Builder(chosen, group or Communicator(), lambda name: DenseWeight, experts=experts)
    layer = make(builder)
    tensors: Tensors = {}

    def fill(slot: WeightSlot) -> None:
        whole = tensors.setdefault(slot.name, draw(slot.name, *slot.shape))
        assert whole.shape == slot.shape
        part = whole[slot.pick]
        slot.target.copy_(part.transpose(-1, -2) if slot.transposed else part)

    builder.fill(fill)
    return layer, tensors


def on_two_ranks(make: Callable[[Builder], Any], x: Tensor) -> list[Tensor]:
    """The result of each rank's share of the layer for x."""
    return on_every_rank(2, lambda group: build_layer(make, group=group)[0](x.clone()))
