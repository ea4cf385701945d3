"""KV compression in the worker: assigns slices of a request's blocks to KV heads (see attention/by_head.py).

A compressed request has the blocks of its kept tokens, then those of all later tokens. The scheduler grants the blocks,
and the worker assigns the slices of the first ones to layers and KV heads. With num_kept_blocks = 2, and 2 layers of
one KV head that keep 1 and 3 blocks:

    block                  table[0]   table[1]   table[2]  ...
    slice of layer 0       layer 0    layer 1    layer 0
    slice of layer 1       layer 1    layer 1    layer 1

Layers are compressed one after the other, those that keep the least first, and slices are assigned in that order: all
slices of the first of these layers, then all of the second. So a layer's tokens are moved into its own slices or those
of already compressed layers, and need no extra memory. The slices of later tokens are where they would be without
compression: only attention depends on the assignment. When a request is compressed again, layers may use slices of
other layers, so all kept tokens are read before any are written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attention.base import CacheBackend
from quire.attention.by_head import AttentionByHead, EndingText, HeadLayout
from quire.attention.eviction import METHODS
from quire.config.kv_compression import KVCompressionOptions
from quire.layers.forward_state import pick
from quire.layers.step_inputs import Array, StepInputs, StepSize
from quire.messages.step import SchedulerOutput
from quire.models.model import Model
from quire.ops import Kernels
from quire.ops.memory import upload
from quire.worker.device import Device
from quire.worker.forward import Forward, ForwardParts
from quire.worker.input_batch import FlatBatch, InputBatch
from quire.worker.staging import Staging
from quire.worker.state import DeviceState

_NO_PARTS = ForwardParts()


class CompressedRows:
    """Which slices the KV heads of compressed requests have, by row. counts: how many blocks each head kept at the last
    compression. firsts: the number of its first slice, in the order of assignment. order: the layers in the order of
    assignment."""

    def __init__(
        self,
        options: KVCompressionOptions,
        batch: InputBatch,
        device: Device,
        backend: AttentionByHead,
        num_layers: int,
        tables: Tensor,
    ) -> None:
        """num_layers: of layers with keys and values. tables: the block tables on the device, [groups, rows,
        blocks]."""
        self.batch = batch
        self.device = device
        self.backend = backend
        self.tables = tables
        self.layers = num_layers
        self.kv_heads = backend.shape.num_kv_heads
        self.slices = num_layers * self.kv_heads  # of a block
        self.block_size = batch.block_size
        self.eviction = METHODS[options.method](options, batch.block_size)
        rows = len(batch.num_tokens)
        self.num_kept = np.zeros(rows, np.int64)  # blocks; 0 for a row that is not compressed
        self.num_removed = np.zeros(rows, np.int64)  # tokens
        self.most_kept = np.zeros(rows, np.int64)  # an upper bound of the blocks that a head keeps
        self.reads: dict[int, Callable[[], list[Tensor]]] = {}  # by row: reads the exact number once computed
        by_layer = torch.zeros(rows, num_layers, dtype=torch.int64, device=device.torch_device)
        by_head = by_layer[..., None].repeat(1, 1, self.kv_heads)
        self.order = by_layer
        self.counts = by_head
        self.firsts = by_head.clone()

    def forget(self, rows: Any) -> None:
        """Mark these rows as not compressed."""
        for array in (self.num_kept, self.num_removed, self.most_kept):
            array[rows] = 0
        self.counts[rows] = 0

    def pretend(self, count: int) -> None:
        """For warm-up steps: treat the first rows as compressed, with one kept block per head."""
        self.num_kept[:count] = self.most_kept[:count] = 1
        self.counts[:count] = 1

    def prepare(self, flat: FlatBatch, inputs: StepInputs, step: SchedulerOutput) -> None:
        """Complete the inputs of a step with compressed requests."""
        if fresh := [new.row for new in step.new_requests if self.num_kept[new.row]]:
            self.forget(fresh)
        if not step.compressions and not self.num_kept[flat.rows].any():
            return
        endings = [self._ending(flat, inputs, *compression) for compression in step.compressions]
        inputs.by_head = HeadLayout(endings)
        if not self.num_kept[flat.rows].any():
            return
        device = self.device.torch_device
        rows = upload(flat.rows, device)
        removed = upload(self.num_removed[flat.rows], device)
        requests = upload(np.repeat(np.arange(len(flat.rows)), np.diff(flat.query_start_loc)), device)
        table = inputs.block_tables[0].long()
        places = inputs.positions - removed[requests]
        indices = places // self.block_size
        inputs.slot_mapping = (table[requests, indices] * self.block_size + places % self.block_size)[None]
        counts = self.counts[rows]  # [requests, layers, kv_heads]
        kept = upload(self.num_kept[flat.rows], device)
        ends = inputs.seq_lens - removed
        lengths = ends[:, None, None] + (counts - kept[:, None, None]) * self.block_size
        grown = -(-(flat.seq_lens - self.num_removed[flat.rows]) // self.block_size) - self.num_kept[flat.rows]
        width = int((self.most_kept[flat.rows] + grown).max())
        numbers = torch.arange(-(-width // 16) * 16, device=device)  # other kinds of strides make Triton recompile
        tables = self._tables(rows, table, kept, numbers)
        inputs.by_head.lengths = lengths.permute(1, 2, 0).flatten(1).int()
        inputs.by_head.tables = tables.permute(1, 2, 0, 3).flatten(1, 2).int()

    def _ending(self, flat: FlatBatch, inputs: StepInputs, index: int, num_kept_blocks: int, again: int) -> EndingText:
        start, end = flat.query_start_loc[index : index + 2].tolist()
        row = int(flat.rows[index])
        window = self.eviction.options.window
        size = self.block_size
        if again and self.num_kept[row] and row in self.reads:  # it has sampled since then, so this does not wait
            self.most_kept[row] = int(self.reads.pop(row)()[0].numpy()[0])
        num_tokens = int(flat.seq_lens[index] - self.num_removed[row])
        kept = int(self.num_kept[row])
        most = int(self.most_kept[row])
        blocks = inputs.block_tables[0, index, : -(-num_tokens // size)].long()
        missing = most - self.counts[row]  # blocks
        numbers = torch.arange(len(blocks) + most - kept, device=blocks.device) - missing[..., None]
        rows = torch.full((1,), row, device=blocks.device)
        slices = self._tables(rows, blocks[None], torch.full_like(rows, kept), numbers.clamp_(min=0))[0]
        queries = slice(max(start, end - window), end)
        num_tokens += (most - kept) * size
        return EndingText(
            row, num_tokens, num_kept_blocks, queries, blocks, slices, missing * size, self.eviction.scores
        )

    def _tables(self, rows: Tensor, table: Tensor, kept: Tensor, number: Tensor) -> Tensor:
        """Return the slices with these numbers of all heads, [requests, layers, kv_heads, numbers]. table: block ids,
        [requests, blocks]. kept: how many of these blocks have been assigned, [requests]."""
        counts = self.counts[rows][..., None]
        kept = kept[:, None, None, None]
        own = torch.arange(self.slices, device=table.device).view(1, self.layers, self.kv_heads, 1)
        dealt = number < counts
        block, place = self._dealt(self.order[rows], self.firsts[rows][..., None] + number, kept)
        block = torch.where(dealt, block, kept + number - counts).clamp_(max=table.shape[1] - 1)
        blocks = table.gather(1, block.flatten(1)).view_as(block)
        return blocks * self.slices + torch.where(dealt, place, own)

    def _dealt(self, order: Tensor, numbers: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the slices with these numbers are: (indices in the request's table, slices within the block).

        order: [requests, layers]. numbers: [requests, ...]. kept: like numbers, or one number for each request.
        """
        size = (kept * self.kv_heads).clamp(min=1)  # assigned slices of a layer
        turn = numbers // size
        rest = numbers % size
        layer = order.gather(1, turn.clamp(max=self.layers - 1).flatten(1)).view_as(turn)
        return rest // self.kv_heads, layer * self.kv_heads + rest % self.kv_heads

    def compress(self, text: EndingText) -> None:
        """Compress a text whose last step has been launched."""
        size = self.block_size
        row = text.row
        kept = text.num_kept_blocks
        most, tail = divmod(text.num_tokens, size)
        full = len(text.blocks) - (tail > 0)
        is_first = not self.num_kept[row]
        self.evict(text, full, is_first)
        if tail:  # the last block follows the kept ones
            self.batch.block_tables[0, row, kept] = self.batch.block_tables[0, row, full]
        self.num_kept[row] = kept
        self.num_removed[row] += (full - kept) * size
        self.most_kept[row] = most if self.device.is_async else int(self.counts[row].max())
        if self.device.is_async and self.eviction.options.interval:
            self.reads[row] = self.device.download(self.counts[row].max()[None])

    def evict(self, text: EndingText, full: int, is_first: bool) -> None:
        """Choose the tokens that heads keep, and move their keys and values. full: the request's full blocks."""
        size = self.block_size
        row = text.row
        kept = text.num_kept_blocks
        counts, tokens = self.eviction.choose(torch.stack(text.scores), text.num_tokens, kept)
        order = counts.sum(1).argsort(stable=True)
        dealt = counts[order].flatten()
        firsts = torch.empty_like(counts)
        firsts[order] = (dealt.cumsum(0) - dealt).view_as(counts)
        self.counts[row], self.firsts[row], self.order[row] = counts, firsts, order
        if not self.device.is_async:
            tokens = tokens[..., : int(counts.max()) * size]
        moves = self._moves(text, tokens, full, torch.full((1, 1), kept, device=counts.device))
        for keys, values, slots in moves if is_first else list(moves):
            self.backend.put(keys, values, slots)
        if text.num_tokens % size:
            self.tables[0, row, kept] = self.tables[0, row, full]

    def _moves(self, text: EndingText, tokens: Tensor, full: int, kept: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the keys and values that each layer keeps, and their new slots."""
        size = self.block_size
        heads = torch.arange(self.kv_heads, device=tokens.device)
        device = tokens.device
        rank = torch.arange(tokens.shape[-1], device=device)
        most = text.num_tokens // size
        for turn in range(self.layers):
            layer = self.order[text.row, turn : turn + 1]
            sources = text.slices[..., :most].index_select(0, layer)[0]  # [kv_heads, most]
            chosen = tokens.index_select(0, layer)[0]  # [kv_heads, tokens]
            numbers = self.firsts[text.row].index_select(0, layer)[0][:, None] + rank // size
            block, place = self._dealt(self.order[text.row][None], numbers[None], kept)
            targets = text.blocks[block[0].clamp(max=full - 1)] * self.slices + place[0]
            slots = torch.where(chosen < most * size, targets * size + rank % size, -1).flatten()
            entries = chosen.clamp(max=most * size - 1) + heads[:, None] * most * size
            yield *self.backend.pick(sources.flatten(), entries.flatten()), slots


class CompressingStaging(Staging):
    """Completes the inputs of steps with compressed requests."""

    def __init__(
        self,
        device: Device,
        batch: InputBatch,
        kernels: Kernels,
        most_tokens: int,
        make_rows: Callable[[Tensor], CompressedRows],
    ) -> None:
        """make_rows: creates the CompressedRows from the block tables on the device."""
        super().__init__(device, batch, kernels, most_tokens)
        self.rows = make_rows(self.state.block_tables)

    def stage(
        self, flat: FlatBatch, size: StepSize, step: SchedulerOutput, extra: Mapping[str, Array]
    ) -> tuple[StepInputs, dict[str, Tensor]]:
        for index, _, again in step.compressions:
            if again and isinstance(self.state, DeviceState):
                self.state.num_computed[step.rows[index]] -= again
        inputs, tensors = super().stage(flat, size, step, extra)
        self.rows.prepare(flat, inputs, step)
        return inputs, tensors


class CompressingForward(Forward):
    """Compresses texts at the end of a step. It is eager, since attention by head is planned again for each layer of
    each step."""

    def __init__(
        self, model: Model, backends: Sequence[CacheBackend], rows: CompressedRows, parts: ForwardParts = _NO_PARTS
    ) -> None:
        super().__init__(model, backends, parts)
        self.rows = rows

    def run(self, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        if inputs.by_head is None or not inputs.by_head.endings:
            return super().run(inputs, rows)
        hidden = pick(super().run(inputs), rows)  # the last layer computes all queries, since they score its keys
        for text in inputs.by_head.endings:
            self.rows.compress(text)
        return hidden
