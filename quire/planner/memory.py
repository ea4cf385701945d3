"""The memory of a rank, for a layout on a device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from quire.kv.specs import ModelKVSpec, group_entries
from quire.layers.specs import MLPSpec
from quire.planner.devices import Device
from quire.planner.layout import Layout, Stages
from quire.planner.sizes import Footprint

_CONTEXT = 0.6e9  # estimated bytes of a process on a GPU: its context, kernels and library buffers
_CAPTURED = 1.25  # CUDA graphs add a quarter of the largest step's memory, as in quire/worker/memory.py
_CPU_SHARE = 0.5  # share of a CPU's free memory for the KV cache, as in quire/worker/memory.py


@dataclass(frozen=True)
class EngineOptions:
    """The options of `quire serve` that affect a plan, under the same names."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_element_bytes: int | None = None  # None for the model's dtype


@dataclass(frozen=True)
class Memory:
    """The memory of the rank with the largest share of the weights, in bytes. largest: the limit. step: memory of the
    largest step. blocks: blocks of a replica's KV cache, 0 if the weights do not fit. tokens: capacity of these blocks
    in tokens."""

    largest: int
    weights: int
    step: int
    block_bytes: int
    blocks: int
    tokens: int

    @property
    def fits(self) -> bool:
        return self.blocks > 0

    def with_blocks(self, blocks: int) -> Self:
        """Return a copy with the number of blocks of a real engine."""
        return replace(self, blocks=blocks, tokens=self.tokens * blocks // max(self.blocks, 1))


def kv_groups(footprint: Footprint, max_model_len: int) -> list[ModelKVSpec]:
    """Return the groups of the KV cache, as created by a worker with this share of the model."""
    spec = footprint.spec
    shapes = [part.cache_shape(footprint.share.group) for _, part in spec.cached]
    kept = [part.kv_spec(layer, spec.windows[layer]) for layer, part in spec.cached]
    return group_entries(kept, max_model_len, shapes)


def memory_of(
    footprint: Footprint, layout: Layout, device: Device, options: EngineOptions, quantization: str | None
) -> Memory:
    """Return the memory of a layout. The stage with the least room for KV blocks is decisive."""
    parts = Stages(footprint, layout).parts
    return min((_of_part(part, device, options, quantization) for part in parts), key=lambda memory: memory.blocks)


def _of_part(part: Footprint, device: Device, options: EngineOptions, quantization: str | None) -> Memory:
    weights = int(part.weights(quantization)[0])
    step = int(_step_bytes(part, options))
    if device.kind.is_gpu:
        largest = int(device.memory * options.gpu_memory_utilization)
        room = largest - weights - step - int(_CONTEXT)
    else:
        largest = int(device.memory)
        room = int((largest - weights - step) * _CPU_SHARE)
    groups = kv_groups(part, options.max_model_len)
    block_bytes = max(_block_bytes(part, groups, options), 1)
    blocks = max(0, room // block_bytes - 1)  # block 0 is reserved
    longest = options.max_model_len
    chunk = options.max_num_batched_tokens
    held = sum(spec.max_blocks(longest, chunk, options.block_size) for spec in groups)
    if held > blocks:  # a request of max_model_len tokens must fit
        return Memory(largest, weights, step, block_bytes, 0, 0)
    return Memory(largest, weights, step, block_bytes, blocks, blocks * longest // max(held, 1))


def _block_bytes(part: Footprint, groups: Sequence[ModelKVSpec], options: EngineOptions) -> int:
    scale = 1.0 if options.kv_element_bytes is None else options.kv_element_bytes / part.element_bytes
    entries = (sum(part.entry(layer) for layer in spec.layers if layer in part.layers) for spec in groups)
    return int(max(entries) * options.block_size * scale)


def _step_bytes(part: Footprint, options: EngineOptions) -> float:
    """Return the memory of the largest step: hidden states and results of the widest layer, and logits in float32."""
    spec = part.spec
    tokens = options.max_num_batched_tokens
    widest = max(
        (2 if mlp.gated else 1) * mlp.intermediate_size
        if isinstance(mlp, MLPSpec)
        else 3 * mlp.top_k * mlp.intermediate_size
        for mlp in spec.mlps
        if mlp is not None
    )
    activations = tokens * 2 * (4 * spec.hidden_size + 1.5 * widest / part.share.tp)
    logits = options.max_num_seqs * spec.vocab_size * 4 * 2 if part.share.has_head else 0
    return max(activations, logits) * _CAPTURED
