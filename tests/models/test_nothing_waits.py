"""On a GPU, a model's layers must not ask what is in a tensor: the host would wait for the device, in every layer.

On torch's meta device tensors have no content, so that a layer which asks fails; as does one that makes a tensor
elsewhere than where the model is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from quire.attention.base import AttentionBackend, AttentionShape, CacheBackend
from quire.attention.states import StateBackend
from quire.checkpoints.formats.config import quantization_method
from quire.checkpoints.metadata import hf_config
from quire.kv.specs import StateShape
from quire.layers.build import Builder
from quire.layers.embedding import LowRankEmbedding
from quire.layers.linear import Adapters
from quire.layers.lora import AdapterSlots, LowRank
from quire.layers.specs import PoolerSpec, Pooling
from quire.layers.step_inputs import StepInputs, StepSize, dimensions
from quire.models.decoder import Decoder
from quire.models.pooler import Pooler
from quire.models.registry import spec_of
from quire.ops import Kernels, Target
from quire.parallel.mesh import Communicator
from quire.worker.forward import Forward
from support.checkpoints import ALL_VARIANTS

META = torch.device("meta")
# Their selections go through a step's requests one by one, see docs/models.md.
WAITING = ("deepseek_v4", "deepseek_v4-published-fields", "glm5_next", "minimax_m3")
NOT_WAITING = [variant for variant in ALL_VARIANTS if variant not in WAITING]


class NoAttention(AttentionBackend):
    """Of the right shapes."""

    name = "none"
    cache_dtype, block_shape = torch.uint8, (0,)

    @classmethod
    def unsupported(cls, shape: AttentionShape) -> str | None:
        return None

    def plan(self, layout: Any, over: Any = None) -> Any:
        return layout

    def store(self, cache: Tensor, k: Tensor, v: Tensor | None, plan: Any) -> None:
        assert k.device == META

    def select_from(self, cache: Tensor, q: Tensor, weights: Tensor, k: Tensor, plan: Any) -> None:
        assert q.device == weights.device == k.device == META

    def attend(self, q: Tensor, cache: Tensor, plan: Any, **options: Any) -> tuple[Tensor, Tensor]:
        assert q.device == META
        tokens, heads, _ = q.shape
        out = torch.empty(tokens, heads, self.shape.out_dim, dtype=q.dtype, device=META)
        return out, torch.empty(tokens, heads, device=META)


def backend_of(c: Any) -> CacheBackend:
    if isinstance(c, StateShape):
        return StateBackend(c, 16, drafts=3)
    return NoAttention(AttentionShape(c.num_heads, c.num_kv_heads, c.head_dim, 16, torch.bfloat16, META, c.value_dim))


def forward_of(directory: Path, adapters: AdapterSlots | None = None) -> Forward:
    """The forward of a model without weights."""
    description = hf_config(directory, {})
    kernels = Kernels(Target(META, torch.bfloat16))
    # The reference loops over experts; the implementations for GPUs do not.
    kernels.grouped_linear = lambda x, weight, bias, offsets: x.new_empty(len(x), weight.shape[1])  # type: ignore[method-assign]
    # The same holds for states, and requests.
    kernels.causal_conv = lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format)  # type: ignore[method-assign]
    kernels.scan = lambda q, k, v, *_: torch.empty_like(v, memory_format=torch.contiguous_format)  # type: ignore[method-assign]
    kernels.selective_scan = kernels.scan  # type: ignore[method-assign]
    builder = Builder(kernels, Communicator(), quantization_method(description), adapters=adapters)
    model = Decoder(builder, spec_of(description), 64)
    builder.fill(lambda slot: None)
    backends = [backend_of(shape) for shape in model.cache_shapes]
    memory = [
        torch.empty(1, len(s.entries) * b.entry_bytes(), dtype=torch.uint8, device=META)
        for s, b in zip(model.kv_specs, backends, strict=True)
    ]
    model.bind_cache(backends, memory)
    return Forward(model, backends)


def logits_of(forward: Forward, size: StepSize, *optional: str) -> Tensor:
    """The logits of three tokens of a dummy step. optional: see StepInputs.declarations."""
    lengths = dimensions(size, len(forward.model.kv_specs), 4)
    arrays = {name: declaration.blank(lengths) for name, declaration in StepInputs.declarations(*optional).items()}
    inputs = StepInputs(size=size, **{name: torch.from_numpy(array).to(META) for name, array in arrays.items()})
    wanted = torch.empty(3, dtype=torch.int64, device=META)
    return forward.logits(forward(inputs, wanted), inputs, wanted)


@pytest.mark.sampled(25)
@pytest.mark.parametrize("variant", NOT_WAITING)
@torch.inference_mode()
def test_a_forward_needs_nothing_of_the_device(checkpoints, variant):
    forward = forward_of(checkpoints.path(variant))
    logits = logits_of(forward, StepSize(7, 3))
    assert (logits.shape, logits.device) == ((3, forward.model.vocab_size), META)


@pytest.mark.sampled(25)
@pytest.mark.parametrize("variant", NOT_WAITING)
@torch.inference_mode()
def test_every_product_gets_the_adapters_of_its_tokens(checkpoints, variant, monkeypatch):
    """A layer that forgets to pass them on would use the base model's weights."""
    reached: list[Adapters] = []
    for kind in (LowRank, LowRankEmbedding):

        def add(self: LowRank, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
            assert len(out) == len(x) == len(slots)
            reached.append(self)
            return out

        monkeypatch.setattr(kind, "add", add)
    adapters = AdapterSlots(2, 4)
    forward = forward_of(checkpoints.path(variant), adapters)
    logits_of(forward, StepSize(7, 3), "adapters")
    assert not reached
    logits_of(forward, StepSize(7, 3, adapted=True), "adapters")
    assert len(reached) == len(adapters.products) > 0
    assert set(map(id, reached)) == set(map(id, adapters.products))


@pytest.mark.parametrize("pooling", get_args(Pooling))
def test_pooling_needs_nothing_of_the_device(pooling):
    builder = Builder(Kernels(Target(META, torch.bfloat16)), Communicator(), lambda name: None)
    hidden, lengths = (
        torch.empty(7, 4, dtype=torch.bfloat16, device=META),
        torch.empty(3, dtype=torch.int64, device=META),
    )
    pooled = Pooler(builder, PoolerSpec(pooling), None)(hidden, torch.empty_like(lengths), lengths)
    assert (pooled.shape, pooled.device) == ((7 if pooling == "all" else 3, 4), META)
