"""Forwards that are recorded once and then repeated without Python: calls on a CPU, a CUDA graph on a GPU."""

import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.attention.base import AttentionBackend
from quire.layers.forward_state import ForwardState, pick
from quire.messages.errors import error_text
from quire.messages.step import SchedulerOutput
from quire.metrics.logging import logger
from quire.models.model import Model
from quire.ops.cpu.recording import Arena, Recording
from quire.worker.forward import Forward
from quire.worker.input_batch import FlatBatch
from quire.worker.staging import STEP, Staging, StepInputs


@dataclass
class _Calls:
    """A recorded forward and the memory that it reads its step from."""

    recording: Recording
    x: Tensor
    state: ForwardState
    hidden: Tensor


class RecordedForward(Forward):
    """On a CPU. Records the layers of steps in which each request has one token, once for each number of requests.

    A model whose layers are not kernels only (see Recording) is run as ever.
    """

    def __init__(self, model: Model, backends: Sequence[AttentionBackend]) -> None:
        super().__init__(model, backends)
        self.usable = True
        self._arena = Arena()
        self._recorded: dict[int, _Calls] = {}  # by number of requests

    def __call__(self, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        if inputs.num_tokens != inputs.num_requests or not self.usable:
            return super().__call__(inputs, rows)
        x, state = self.embed(inputs)
        calls = self._recorded.get(len(x))
        if calls is None:
            state.plans = self.plan(inputs)
            return pick(self._record(x, state), rows)
        ctypes.memmove(calls.x.data_ptr(), x.data_ptr(), x.nbytes)  # copy_ would wake torch's threads
        calls.state.positions.copy_(state.positions)
        for old, new in zip(calls.state.rotary, state.rotary, strict=True):
            old[0].copy_(new[0])
            old[1].copy_(new[1])
        self.plan(inputs, calls.state.plans)
        calls.recording.replay()
        return pick(calls.hidden, rows)

    def _record(self, x: Tensor, state: ForwardState) -> Tensor:
        with Recording(self._arena) as recording:
            hidden = self.model.forward(x, state, None, self.taps)
        if recording.obstacle is None:
            self._recorded[len(x)] = _Calls(recording, x, state, hidden)
        else:
            self.usable = False
            logger.debug("Steps are not recorded: the model's layers use %s", recording.obstacle)
        return hidden


DECODE_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 1025, 16))  # requests, each with one token
MIXED_SIZES = (32, 64, 128, 192, 256, 320, 384, 512, 768, 1024)  # tokens


@dataclass
class _Graph:
    """A captured forward and the memory that it reads its step from; block tables are where they always are."""

    replay: Callable[[], None]
    inputs: StepInputs
    hidden: Tensor


class CapturedForward(Forward):
    """On a GPU. Steps are padded to the next of some sizes, whose forwards were captured beforehand.

    Those with more than a token for some request are padded to max_num_seqs requests. The largest call every kernel
    anew: they take longer than that.
    """

    def __init__(self, model: Model, backends: Sequence[AttentionBackend], staging: Staging, most_tokens: int) -> None:
        super().__init__(model, backends, staging.last_tokens)
        self.staging, self.max_num_seqs = staging, len(staging.batch.num_tokens)
        self._decode_sizes = [*(n for n in DECODE_SIZES if n < self.max_num_seqs), self.max_num_seqs]
        # As many tokens as requests would say that each has one.
        self._mixed_sizes = [n for n in MIXED_SIZES if n <= most_tokens and n != self.max_num_seqs]
        self._graphs: dict[tuple[int, int], _Graph] = {}  # by tokens and requests

    def fit(self, tokens: int, requests: int) -> tuple[int, int]:
        one_each = tokens == requests
        larger = (n for n in (self._decode_sizes if one_each else self._mixed_sizes) if n >= tokens)
        size = next(larger, None)
        padded = None if size is None else (size, size if one_each else self.max_num_seqs)
        return padded if padded in self._graphs else (tokens, requests)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, the largest first: the smaller ones then find memory."""
        batch, started = self.staging.batch, time.perf_counter()
        sizes = [(n, n) for n in self._decode_sizes] + [(n, self.max_num_seqs) for n in self._mixed_sizes]
        gc.collect()
        gc.disable()  # what it frees on the device while something is captured may end the capture
        try:
            for tokens, requests in sorted(sizes, reverse=True):
                flat = FlatBatch.idle(tokens, requests, len(batch.block_tables), batch.max_model_len)
                self._capture(self.staging.stage(flat, SchedulerOutput(0), {})[0])
        except Exception as error:  # Triton's are of many kinds
            self._graphs.clear()
            logger.warning("Steps run without CUDA graphs: %s", error_text(error).partition("\n")[0])
        finally:
            gc.enable()
        if self._graphs:
            logger.info("CUDA graphs: %d sizes in %.1f s", len(sizes), time.perf_counter() - started)

    def _capture(self, inputs: StepInputs) -> None:
        assert inputs.packed is not None
        packed, start, fixed = inputs.packed.clone(), inputs.packed.data_ptr(), {}
        for name in STEP:
            tensor: Tensor = getattr(inputs, name)
            begin = tensor.data_ptr() - start
            fixed[name] = packed[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        # A graph is to be right for every step: what is only for prompts without cached tokens is not in it.
        fixed_inputs = replace(inputs, **fixed, packed=packed, longest_prompt=0)
        hidden, replay = self.staging.device.capture(lambda: Forward.__call__(self, fixed_inputs))
        self._graphs[inputs.num_tokens, inputs.num_requests] = _Graph(replay, fixed_inputs, hidden)

    def __call__(self, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        graph = self._graphs.get((inputs.num_tokens, inputs.num_requests))
        if graph is None or inputs.packed is None or graph.inputs.packed is None:
            return super().__call__(inputs, rows)
        graph.inputs.packed.copy_(inputs.packed)
        graph.replay()
        return pick(graph.hidden, rows)
