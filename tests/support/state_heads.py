"""Small random target models, and heads that are loaded from checkpoints in the formats in which they are published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.checkpoints.weights import load_dummy, load_weights, open_checkpoint
from quire.layers.build import Builder
from quire.layers.linear import DenseWeight
from quire.models.decoder import Decoder
from quire.models.heads.head import HeadMaker
from quire.models.registry import spec_of
from quire.ops import OPS, Kernels, Target
from quire.ops.cpu.build import library
from quire.parallel.mesh import Communicator
from support.layers import build_layer

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


def make_target(group: Communicator | None = None, **differences: Any) -> tuple[Decoder, dict[str, Tensor]]:
    """A Llama whose spec differs in these fields, and its tensors."""
    spec = replace(spec_of(TARGET), **differences)
    return build_layer(lambda builder: Decoder(builder, spec, 32), group=group)


def make_head(
    maker: HeadMaker,
    config: dict[str, Any],
    directory: Path | None,
    target: Decoder,
    kernels: str = "reference",
    group: Communicator | None = None,
    has: Callable[[str], bool] = lambda name: False,
) -> Any:
    """The head whose checkpoint is in the directory, or one with dummy weights, of which `has` says which exist."""
    if kernels == "cpu" and library() is None:
        pytest.skip("the CPU kernels cannot be compiled here")
    pins = dict.fromkeys(OPS, "reference") if kernels == "reference" else {}
    chosen = Kernels(Target(torch.device("cpu"), torch.float32), pins)
    builder = Builder(chosen, group or Communicator(), lambda name: DenseWeight)
    if directory is None:
        head = maker(builder, config, target, has, 32)
        load_dummy(builder, False)
        return head
    checkpoint = open_checkpoint(directory)
    head = maker(builder, config, target, checkpoint.has, 32)
    load_weights(checkpoint, builder, head.ignored, False)
    return head


class Chooser:
    """Chooses the most likely tokens, and keeps all logits."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, logits: Tensor, number: int) -> Tensor:
        assert number == len(self.logits)
        self.logits.append(logits)
        return logits.argmax(dim=-1)
