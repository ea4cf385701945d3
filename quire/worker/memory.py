"""Measures memory, and computes the size of the KV cache."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from quire.config.engine import ConfigError, EngineConfig
from quire.layers.step_inputs import StepSize
from quire.messages.media import EncoderLimits
from quire.worker.runner import Runner

FREE_SHARE = 0.5  # the fraction of free CPU memory to use, unless --kv-cache-memory-bytes is set
_RESERVE = 256 * 2**20  # bytes for what is loaded or allocated later: kernels, NCCL's channels, fragments of memory


def budget(config: EngineConfig, device: torch.device, ranks: int = 1) -> int:
    """Return the GPU bytes that each of the `ranks` on it may use. Raises ConfigError if other processes use some of
    them.

    Ranks must agree on the smallest of their budgets before one of them loads weights.
    """
    if device.type != "cuda":
        return 0
    _, total = torch.cuda.mem_get_info(device)
    free = _free(device)  # with what an earlier engine of this process has left
    share = config.cache.gpu_memory_utilization
    if free < share * total:
        raise ConfigError(
            f"gpu_memory_utilization={share} asks for {_gib(share * total)} of the GPU's {_gib(total)}, "
            f"but only {_gib(free)} are free; lower gpu_memory_utilization, or end the other processes "
            "on this GPU"
        )
    return (int(share * total) - (total - free)) // ranks


@contextlib.contextmanager
def explained(what: str, device: torch.device) -> Iterator[None]:
    """Convert an out-of-memory error of a GPU to a ConfigError that names what did not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        _, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"{what} do not fit into the GPU's {_gib(total)}; take a smaller model, or quantization=int8 or int4"
        ) from error


class Gauge:
    """Measures how much GPU memory this rank has taken since the gauge was made: that of torch's tensors, and what
    torch does not count, such as loaded kernels and the buffers of NCCL and other libraries."""

    def __init__(self, device: torch.device, ranks: int = 1) -> None:
        """ranks: how many share the GPU. With several, what only one of them has taken cannot be seen, so only torch's
        memory counts."""
        self._device = device
        self._sees_all = ranks == 1
        self._torch_before = torch.cuda.memory_allocated(device)
        self._free_before = _free(device)

    def used(self) -> int:
        torch.cuda.empty_cache()
        by_torch = torch.cuda.memory_reserved(self._device) - self._torch_before
        return max(by_torch, self._free_before - _free(self._device) if self._sees_all else 0)


def _free(device: torch.device) -> int:
    """Return the free bytes of a GPU, with those that torch keeps although no tensor uses them."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class StepMemory(NamedTuple):
    """The GPU bytes of the largest step. tokens: its size. activations: in use only during the step. embeddings: of the
    encoder's cache."""

    tokens: int
    activations: int
    embeddings: int


def largest_step(runner: Runner[Any], tokens: int, encoders: EncoderLimits) -> StepMemory:
    """Run a step of this size, encode the largest items, and measure the memory of both. Raises ConfigError if there is
    too little."""
    device = runner.device.torch_device
    batch = runner.batch
    rows = min(len(batch.num_tokens), tokens)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    with explained(f"weights and a step of {tokens} tokens", device), torch.inference_mode():
        embeddings = runner.media.rehearse(encoders)
        size = StepSize(tokens, len(batch.num_tokens))
        runner.forward.agree(size)
        inputs = runner.staging.stage_dummy(size)
        runner.run(inputs, rows)
        torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()
    return StepMemory(tokens, step, embeddings)


def left_for_cache(budget: int, used: int, step: StepMemory, graphs: int) -> int:
    """Return the bytes of the budget that remain for the KV cache. used: by weights and libraries. graphs: bytes of
    CUDA graphs. Raises ConfigError if nothing is left."""
    left = budget - used - step.activations - step.embeddings - graphs - _RESERVE
    if left <= 0:
        raise ConfigError(
            f"nothing is left for the KV cache: of {_gib(budget)}, weights and libraries take {_gib(used)}, a step of "
            f"{step.tokens} tokens {_gib(step.activations)}, CUDA graphs {_gib(graphs)}, and a reserve {_gib(_RESERVE)}"
            f"{_of_encoder(step.embeddings)}; raise gpu_memory_utilization, lower max_num_batched_tokens or "
            "max_cudagraph_capture_size, or quantize"
        )
    return left


def _of_encoder(embeddings: int) -> str:
    return f", and the encoder's cache {_gib(embeddings)} (encoder_cache_size)" if embeddings else ""


def num_blocks(config: EngineConfig, free: int, block_bytes: int, useful: int, device: torch.device) -> int:
    """Return the number of blocks in the cache: the number set by the options, otherwise as many as fit into memory,
    but at most `useful`, the number that all rows together can use. Raises ConfigError if the options require more than
    is free."""
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        name = "num_gpu_blocks_override"
        count = cache.num_gpu_blocks_override
    elif cache.kv_cache_memory_bytes is not None:
        name = "kv_cache_memory_bytes"
        count = cache.kv_cache_memory_bytes // block_bytes
    else:
        share = FREE_SHARE if device.type == "cpu" else 1.0
        return max(1, min(int(free * share) // block_bytes, useful))
    if count * block_bytes > free:
        raise ConfigError(
            f"{name} asks for a KV cache of {_gib(count * block_bytes)}, but only {_gib(free)} of memory "
            f"are free; lower {name}"
        )
    return max(1, count)  # at least the null block; the scheduler's error reports how many blocks are missing


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def weights_in_memory(model: object) -> int:
    """Return the bytes of the tensors that a model, its layers and their weights hold on this rank.

    Shared memory counts once. Small tensors are packed into large storages, whose unused ends do not count, since they
    use no memory until they are written.
    """
    parts: list[tuple[int, int]] = []  # addresses: the first byte, and the byte after the last
    seen: set[int] = set()
    unvisited = [model]
    while unvisited:
        item = unvisited.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            last = sum((size - 1) * stride for size, stride in zip(item.shape, item.stride(), strict=True))
            parts.append((item.data_ptr(), item.data_ptr() + (last + 1) * item.element_size() * bool(item.numel())))
        elif isinstance(item, dict):
            unvisited += item.values()
        elif isinstance(item, list | tuple):
            unvisited += item
        elif type(item).__module__.startswith("quire"):
            unvisited += getattr(item, "__dict__", {}).values()
    total = counted = 0
    for begin, end in sorted(parts):
        total += max(0, end - max(begin, counted))
        counted = max(counted, end)
    return total
