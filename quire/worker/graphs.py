"""Forwards that are recorded once and then replayed without Python: recorded steps on a CPU, CUDA graphs on a GPU."""

import contextlib
import ctypes
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from quire.attention.base import CacheBackend
from quire.config.kernels import KernelConfig
from quire.layers.forward_state import ForwardState, pick
from quire.layers.step_inputs import StepInputs, StepSize
from quire.messages.errors import error_text
from quire.models.model import Model
from quire.observability.logging import logger
from quire.ops.cpu.recording import Arena, Recording
from quire.worker.forward import Forward, ForwardParts
from quire.worker.staging import Staging

_NO_PARTS = ForwardParts()


@dataclass
class _Calls:
    """A recorded forward, and the memory from which it reads the inputs of a step."""

    recording: Recording
    x: Tensor
    state: ForwardState
    hidden: Tensor


class RecordedForward(Forward):
    """Records steps on a CPU: the layers of steps whose requests have equally many tokens, once for each size.

    A model whose layers do not consist of kernels only (see Recording) runs eagerly.
    """

    def __init__(self, model: Model, backends: Sequence[CacheBackend], parts: ForwardParts = _NO_PARTS) -> None:
        super().__init__(model, backends, parts)
        self.usable = True
        self._arena = Arena()
        self._recorded: dict[StepSize, _Calls] = {}

    def layers(self, x: Tensor, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        reaches_layers = inputs.media is not None and inputs.media.reaches_layers
        if not inputs.size.tokens_per_request or not self.usable or reaches_layers:
            return super().layers(x, inputs, rows)
        calls = self._recorded.get(inputs.size)
        if calls is None:
            return pick(self._record(x, inputs), rows)
        ctypes.memmove(calls.x.data_ptr(), x.data_ptr(), x.nbytes)  # copy_ would wake torch's thread pool
        state = calls.state
        state.inputs.copy_for_layers(inputs)
        for (cos, sin), table in zip(state.rotary, self.model.rotary, strict=True):
            new_cos, new_sin = table(inputs.rotary_positions)
            cos.copy_(new_cos)
            sin.copy_(new_sin)
        self.plan(inputs, state.plans)
        calls.recording.replay()
        return pick(calls.hidden, rows)

    def _record(self, x: Tensor, inputs: StepInputs) -> Tensor:
        state = self.state(inputs)
        with Recording(self._arena) as recording:
            hidden = self.compute(x, state, None, self.taps)
        state.first_values = None  # its memory belongs to the arena, which other recordings reuse
        if recording.obstacle is None:
            self._recorded[inputs.size] = _Calls(recording, x, state, hidden)
        else:
            self.usable = False
            logger.debug("Steps are not recorded: the model's layers use %s", recording.obstacle)
        return hidden


DECODE_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 1025, 16))  # requests, each with one token
DRAFT_SIZES = (1, 2, 4, 8, 16, 32, 64)  # requests, each with one token and equally many drafts
MOST_DRAFTS = 7  # per request; requests with more drafts use graphs of mixed sizes
_DEFAULTS = KernelConfig()
MIXED_SIZES = (32, 64, 128, 192, 256, 320, 384, 512, 768, 1024)  # tokens


def graph_sizes(
    options: KernelConfig, most_requests: int, most_tokens: int, most_per_request: int
) -> dict[int, list[StepSize]]:
    """Return the sizes of steps to capture, in ascending order, by the tokens of each request: 1, 2, ...
    most_per_request; 0 for steps of mixed requests. By default, these are the constants above. With
    cudagraph_capture_sizes, the steps have about these numbers of tokens, whatever their requests are."""
    given = sorted(set(options.cudagraph_capture_sizes))
    most = options.max_cudagraph_capture_size or sys.maxsize
    decoding = given or [*(n for n in DECODE_SIZES if n < most_requests), most_requests]
    sizes = {1: [StepSize(n, n, 1) for n in decoding if n <= most_requests]}
    for count in range(2, most_per_request + 1):
        requests = dict.fromkeys(size // count for size in given if size >= count) if given else DRAFT_SIZES
        sizes[count] = [StepSize(n * count, n, count) for n in requests if n <= most_requests]
    sizes[0] = [StepSize(n, most_requests) for n in given or MIXED_SIZES if n <= most_tokens]
    return {count: [size for size in of_count if size.tokens <= most] for count, of_count in sizes.items()}


@dataclass
class _Graph:
    """A captured forward, and the memory `x` from which it reads embeddings. It reads its other inputs from the memory
    of Staging."""

    replay: Callable[[], None]
    x: Tensor
    hidden: Tensor


class CapturedForward(Forward):
    """Replays CUDA graphs on a GPU. Forwards of some sizes are captured at start. Steps are padded to the next size.

    Steps whose requests have equally many tokens are padded to a larger number of such requests, others to max_num_seqs
    requests. Steps larger than all captured sizes run eagerly: their kernels take longer than the launches.
    """

    def __init__(
        self,
        model: Model,
        backends: Sequence[CacheBackend],
        staging: Staging,
        most_tokens: int,
        most_per_request: int = 1,
        is_only_rank: bool = True,
        parts: ForwardParts = _NO_PARTS,
        options: KernelConfig = _DEFAULTS,
    ) -> None:
        """most_per_request: steps with 1, 2, ... up to this many tokens per request are captured. is_only_rank: if
        False, a failed capture is an error, since the other ranks' graphs wait for this rank's part of each
        all-reduce."""
        super().__init__(model, backends, parts)
        self.is_only_rank = is_only_rank
        self._is_required = options.require_cuda_graphs
        self.staging = staging
        most_requests = len(staging.batch.num_tokens)
        self._sizes = graph_sizes(options, most_requests, most_tokens, most_per_request)
        if self.capacity is not None:
            most = self.capacity.most
            self._sizes = {n: [size for size in sizes if size.tokens <= most] for n, sizes in self._sizes.items()}
        self._graphs: dict[StepSize, _Graph] = {}

    def fit(self, size: StepSize) -> StepSize:
        largest = self.agree(size)
        count = largest.tokens_per_request if largest.tokens_per_request in self._sizes else 0
        sizes = chain(self._sizes[count], self._sizes[0])
        found = next((larger for larger in sizes if larger.tokens >= largest.tokens), None)
        if found is None:
            return size
        self._set_capacity(found)
        return found._replace(adapted=size.adapted)

    def _set_capacity(self, size: StepSize) -> None:
        """Prepare for a step that all ranks pad to the same size."""
        if self.capacity is not None:
            self.capacity.tokens = size.tokens

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, the largest first, so that the smaller ones reuse its memory. If memory does not suffice,
        the larger half of the sizes is left out; such steps run eagerly, since their kernels take longer than launches.

        Raises RuntimeError if nothing can be captured, but graphs are required or other ranks depend on them.
        """
        started = time.perf_counter()
        every = self._all_sizes()
        try:
            with _no_collection(), self._without_layer_marks():
                captured = self._capture_what_fits(every)
        except Exception as error:  # Triton raises many kinds of exceptions
            self._forget_graphs()
            self._sizes = {0: []}
            if not self.is_only_rank:
                raise RuntimeError("the CUDA graphs of several ranks cannot be captured; set enforce_eager") from error
            if self._is_required:
                raise RuntimeError(f"the CUDA graphs cannot be captured: {_first_line(error)}") from error
            logger.warning("Steps run without CUDA graphs: %s", _first_line(error), exc_info=True)
            return
        if len(captured) < len(every):
            kept = {size._replace(adapted=False) for size in captured}
            self._sizes = {count: [size for size in sizes if size in kept] for count, sizes in self._sizes.items()}
            logger.warning(
                "%d of %d CUDA graphs do not fit into the GPU's memory; steps of more than %d tokens run without one. "
                "Lower gpu_memory_utilization or max_cudagraph_capture_size",
                len(every) - len(captured),
                len(every),
                captured[0].tokens,
            )
        if self._graphs:
            logger.info("CUDA graphs: %d sizes in %.1f s", len(self._graphs), time.perf_counter() - started)

    @torch.inference_mode()
    def trial(self) -> int:
        """Capture some sizes as a trial, without keeping them. Returns an estimate of the bytes that the graphs of all
        sizes need. All ranks call this together.

        The largest graphs with each number of tokens per request allocate the memory that all graphs share: that of
        tensors within a step. The partial results of divided attention are among them, and depend on this number rather
        than on the tokens of the step. Each further graph adds its result, which grows with its tokens, and a fixed
        part: those of the largest and of the smallest one are measured.
        """
        device = self.staging.device.torch_device
        free = [_free_memory(device)]
        sizes = self._all_sizes()
        largest = sorted({size.tokens_per_request: size for size in reversed(sizes)}.values(), reverse=True)
        further = [size for size in sizes if size not in largest]
        with _no_collection(), self._without_layer_marks(), contextlib.suppress(Exception):  # capture() reports it
            for size in [*largest, *further[:1], *further[1:][-1:]]:
                self._capture([size])
                free.append(_free_memory(device))
        self._forget_graphs()
        drops = [max(0, before - after) for before, after in itertools.pairwise(free)]
        if len(drops) < len(largest) + 2:
            return sum(drops)
        *shared, most, least = drops
        growing = max(0, most - least)
        return sum(shared) + sum(least + growing * size.tokens // further[0].tokens for size in further)

    def _all_sizes(self) -> list[StepSize]:
        """Return the sizes to capture, the largest first."""
        variants = (False,) if self.model.adapters is None else (False, True)
        sizes = [size._replace(adapted=v) for size in chain(*self._sizes.values()) for v in variants]
        return sorted(sizes, reverse=True)

    def _capture_what_fits(self, sizes: list[StepSize]) -> list[StepSize]:
        """Capture the sizes that fit into memory. Returns them."""
        while not self._fit_into_memory(sizes):
            self._forget_graphs()
            sizes = sizes[len(sizes) // 2 :]
        return sizes

    def _fit_into_memory(self, sizes: list[StepSize]) -> bool:
        """Capture the sizes. Returns False if memory does not suffice for all of them."""
        try:
            self._capture(sizes)
        except torch.OutOfMemoryError:
            if not self.is_only_rank or len(sizes) == 1:  # other ranks already wait for this rank's part of a step
                raise
            return False
        return True

    def _capture(self, sizes: list[StepSize]) -> None:
        target = self.model.kernels.target
        most = max((size.tokens for size in sizes), default=0)
        memory = torch.zeros(most, self.model.input_size, dtype=target.dtype, device=target.device)
        for size in sizes:
            self._set_capacity(size)
            inputs = self.staging.stage_dummy(size)
            x = self.model.residual_stream.own(memory[: size.tokens])
            run = partial(self.layers, x, replace(inputs, longest_prompt=0))
            hidden, replay = self.staging.device.capture(run)
            self._graphs[size] = _Graph(replay, x, hidden)

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self.staging.device.forget_graphs()

    @contextlib.contextmanager
    def _without_layer_marks(self) -> Iterator[None]:
        layer_done = self.layer_done
        self.layer_done = None
        try:
            yield
        finally:
            self.layer_done = layer_done

    def run(self, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        graph = self._graphs.get(inputs.size)
        if graph is None or (inputs.media is not None and inputs.media.reaches_layers):
            return super().run(inputs, rows)
        graph.x.copy_(self.embed(inputs))
        graph.replay()
        return pick(graph.hidden, rows)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage now, and none within this block: freeing device memory during a capture may break it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _free_memory(device: torch.device) -> int:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _first_line(error: Exception) -> str:
    return error_text(error).partition("\n")[0]
