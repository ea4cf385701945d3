"""Sends a step's inputs to the device, and owns their memory on the device."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.layers.step_inputs import Array, StepInputs, StepSize, dimensions, dummy_arrays
from quire.messages.step import SchedulerOutput
from quire.ops import Kernels
from quire.worker.device import Device
from quire.worker.input_batch import FlatBatch, InputBatch, Spans
from quire.worker.state import DeviceState, shared_state

MADE_ON_DEVICE = ("input_ids", "positions", "slot_mapping", "seq_lens")  # inputs that the op flat_batch computes


class Staging:
    """Sends the inputs of each step in one copy.

    An asynchronous device has the state of the requests in its memory and makes the flat batch from it. Only state
    changes are copied to it, and sampled tokens need not pass through the host. All steps use the same memory for their
    inputs, so that CUDA graphs can read it. This is safe because a step's kernels run before those of the next.
    """

    def __init__(
        self,
        device: Device,
        batch: InputBatch,
        kernels: Kernels,
        most_tokens: int,
        count_kept: Callable[..., Tensor] | None = None,
    ) -> None:
        """most_tokens: the largest number of tokens in a step. count_kept: replaces the kernel."""
        self.device = device
        self.batch = batch
        self.kernels = kernels
        self.count_kept: Callable[..., Tensor] = count_kept or kernels.count_kept
        self.declarations = StepInputs.declarations(*batch.optional_inputs)
        self.state = shared_state(batch)
        if device.is_async:
            self.state = DeviceState.empty(batch, device.torch_device)
            largest = self._dimensions(StepSize(most_tokens, len(batch.num_tokens)))
            self._memory = {
                name: torch.from_numpy(declaration.blank(largest)).to(device.torch_device).view(-1)
                for name, declaration in self.declarations.items()
            }

    def stage(
        self, flat: FlatBatch, size: StepSize, step: SchedulerOutput, extra: Mapping[str, Array]
    ) -> tuple[StepInputs, dict[str, Tensor]]:
        """Return the inputs of the forward, and the arrays `extra` on the device. Valid until the next call.

        flat: the flat batch of `step`, whose requests and block-table edits have already been applied to the batch.
        size: the padded size; on a CPU, the actual size.
        """
        state = self.state
        if not isinstance(state, DeviceState):
            arrays = {**flat.inputs, **self.batch.gather(flat), **extra}
            tensors: dict[str, Any] = self.device.upload(arrays)
            step_inputs = {name: tensors.pop(name) for name in self.declarations}
            inputs = StepInputs(size=size, host_positions=flat.positions, media=flat.media, **step_inputs)
            return inputs, tensors
        lengths = self._dimensions(size)
        missing = size.requests - len(flat.rows)
        sent = {name: array for name, array in flat.inputs.items() if name not in MADE_ON_DEVICE}
        arrays = {name: self.declarations[name].padded(array, lengths) for name, array in sent.items()}
        arrays["rows"] = np.pad(flat.rows, (0, missing))
        arrays["counts"] = np.diff(arrays["query_start_loc"]).astype(np.int64)
        tensors = self.device.upload({**arrays, **state.changes(self.batch, step), **extra})
        state.apply(tensors)
        inputs = self._inputs(size, flat.longest_prompt)
        inputs.host_positions = flat.positions
        inputs.media = flat.media
        for name in sent:
            getattr(inputs, name).copy_(tensors[name])
        rows = tensors["rows"]
        self.kernels.flat_batch(
            state.token_ids,
            state.num_computed,
            state.block_tables,
            rows,
            inputs.query_start_loc,
            self.batch.block_size,
            *(getattr(inputs, name) for name in MADE_ON_DEVICE),
        )
        state.num_computed.index_add_(0, rows, tensors["counts"])
        torch.index_select(state.block_tables, 1, rows, out=inputs.block_tables)
        return inputs, {name: tensors[name] for name in extra}

    def stage_spans(self, spans: Spans, group: int, copies: int) -> StepInputs:
        """Return the inputs of a forward over tokens that the host knows, see `InputBatch.gather_shared`."""
        tensors: dict[str, Any] = self.device.upload(self.batch.gather_shared(spans, group, copies))
        counts = np.diff(spans.query_start_loc)
        longest = int(counts.max()) if np.array_equal(counts, spans.seq_lens) else 0
        return StepInputs(size=StepSize(len(spans.positions), len(spans.rows)), longest_prompt=longest, **tensors)

    def stage_dummy(self, size: StepSize) -> StepInputs:
        """Return the inputs of a dummy step, used to measure memory or to capture a CUDA graph. It stores nothing in
        the cache.

        Each request has size.tokens_per_request tokens. If that is 0, requests are as long as max_model_len allows,
        until size.tokens are used up: 100 tokens with max_model_len 64 are requests of 64, 36, 0, 0 ... tokens.
        """
        longest = self.batch.max_model_len
        counts = np.full(size.requests, size.tokens_per_request)
        if not size.tokens_per_request:
            counts = np.clip(size.tokens - longest * np.arange(size.requests), 0, longest)
        arrays = dummy_arrays(self.declarations, self._dimensions(size), counts)
        tensors: dict[str, Any] = self.device.upload(arrays)
        if not self.device.is_async:
            return StepInputs(size=size, host_positions=arrays["positions"], **tensors)
        inputs = self._inputs(size, 0 if size.tokens_per_request else int(counts.max()))
        inputs.host_positions = arrays["positions"]
        for name, tensor in tensors.items():
            getattr(inputs, name).copy_(tensor)
        return inputs

    def sampled(
        self, rows: Tensor, positions: Tensor, token_ids: Tensor, requests: Mapping[str, Tensor] | None = None
    ) -> Tensor | None:
        """Store the tokens sampled at a step's places (see FlatBatch): all [places], int64. On a CPU, `InputBatch.fill`
        does this.

        requests: if some have drafts, draft_rows, num_places [requests] and place_start_loc [requests + 1]. Returns
        how many tokens of each request are kept, see the op count_kept; None if all are.
        """
        state = self.state
        kept = None
        if requests is not None:
            kept = self.count_kept(state.token_ids, rows, positions, token_ids, requests["place_start_loc"])
        if isinstance(state, DeviceState):
            if kept is None or requests is None:
                self.kernels.append_tokens(state.token_ids, state.num_tokens, rows, positions, token_ids)
            else:
                state.keep(rows, positions, token_ids, requests, kept)
        return kept

    def drafted(self, rows: Tensor, drafts: Tensor) -> None:
        """Store the drafts [requests, count] after the texts of these rows on the device."""
        token_ids = self.state.token_ids
        count = drafts.shape[1]
        positions = self.state.num_tokens[rows][:, None] + torch.arange(count, device=drafts.device)
        # A row whose text is about to end needs no drafts. A draft may overwrite its last cell, whose token is never
        # computed.
        token_ids.index_put_((rows[:, None], positions.clamp_(max=token_ids.shape[1] - 1)), drafts.int())

    def _dimensions(self, size: StepSize) -> dict[str, int]:
        groups, _, blocks = self.batch.block_tables.shape
        return dimensions(size, groups, blocks)

    def _inputs(self, size: StepSize, longest_prompt: int) -> StepInputs:
        """Return the memory of a step's inputs: the beginning of the memory for the largest step."""
        lengths = self._dimensions(size)
        inputs = dict[str, Any]()
        for name, declaration in self.declarations.items():
            shape = declaration.size(lengths)
            inputs[name] = self._memory[name][: np.prod(shape)].view(shape)
        return StepInputs(size=size, longest_prompt=longest_prompt, **inputs)
