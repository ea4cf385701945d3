"""Forwards that are recorded once and then replayed without Python: recorded steps on a CPU, CUDA graphs on a GPU."""

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Sequence
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
        self.staging = staging
        most_requests = len(staging.batch.num_tokens)
        self._sizes = graph_sizes(options, most_requests, most_tokens, most_per_request)
        self._graphs: dict[StepSize, _Graph] = {}

    def fit(self, size: StepSize) -> StepSize:
        count = size.tokens_per_request if size.tokens_per_request in self._sizes else 0
        sizes = chain(self._sizes[count], self._sizes[0])
        found = next((larger for larger in sizes if larger.tokens >= size.tokens), size)
        return found._replace(adapted=size.adapted)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, the largest first, so that the smaller ones reuse its memory."""
        started = time.perf_counter()
        gc.collect()
        gc.disable()  # a collection that frees device memory during a capture may break the capture
        layer_done = self.layer_done
        self.layer_done = None
        try:
            target = self.model.kernels.target
            most = max((size.tokens for size in chain(*self._sizes.values())), default=0)
            memory = torch.zeros(most, self.model.input_size, dtype=target.dtype, device=target.device)
            variants = (False,) if self.model.adapters is None else (False, True)
            sizes = [size._replace(adapted=v) for size in chain(*self._sizes.values()) for v in variants]
            for size in sorted(sizes, reverse=True):
                inputs = self.staging.stage_dummy(size)
                x = self.model.residual_stream.own(memory[: size.tokens])
                run = partial(self.layers, x, replace(inputs, longest_prompt=0))
                hidden, replay = self.staging.device.capture(run)
                self._graphs[size] = _Graph(replay, x, hidden)
        except Exception as error:  # Triton raises many kinds of exceptions
            if not self.is_only_rank:
                raise RuntimeError("the CUDA graphs of several ranks cannot be captured; set enforce_eager") from error
            self._graphs.clear()
            self._sizes = {0: []}
            logger.warning("Steps run without CUDA graphs: %s", error_text(error).partition("\n")[0])
        finally:
            gc.enable()
            self.layer_done = layer_done
        if self._graphs:
            logger.info("CUDA graphs: %d sizes in %.1f s", len(self._graphs), time.perf_counter() - started)

    def run(self, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        graph = self._graphs.get(inputs.size)
        if graph is None or (inputs.media is not None and inputs.media.reaches_layers):
            return super().run(inputs, rows)
        graph.x.copy_(self.embed(inputs))
        graph.replay()
        return pick(graph.hidden, rows)
