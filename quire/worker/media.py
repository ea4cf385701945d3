"""Media embeddings: encodes items, caches their embeddings as the scheduler orders, and inserts them into steps."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.layers.step_inputs import Array
from quire.layers.step_media import StepMedia
from quire.messages.media import Buffer, EncoderLimits, MediaItem, MediaPlace
from quire.messages.step import NewRequest, SchedulerOutput
from quire.models.model import MediaEncoder, Model
from quire.ops.memory import upload
from quire.worker.input_batch import FlatBatch, InputBatch

AXES = 3  # time, height, width


@dataclass
class _Placed:
    """The embeddings that a step uses. parts: embeddings. indices: of their tokens in the step. spans: of items whose
    tokens attend to each other."""

    parts: list[Tensor] = field(default_factory=list)
    indices: list[Array] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)


class NoMedia:
    """For a model that accepts no media."""

    def rehearse(self, limits: EncoderLimits) -> int:
        """Encode the largest items, and discard the results. Returns the maximum bytes of the embedding cache."""
        return 0

    def install(self, new: NewRequest) -> None:
        """Record the media of a new request."""

    def update(self, step: SchedulerOutput) -> None:
        """Remove and encode the items named by the step. Raises ValueError for an item that the encoder cannot
        process."""

    def place(self, flat: FlatBatch) -> FlatBatch:
        """Return the batch of a step with the embeddings and the rotary positions of its tokens."""
        return flat


class MediaInputs(NoMedia):
    """The media of the running requests.

    The scheduler controls the content of the cache (scheduler/encoding.py): before each step, it names the items to
    encode and to remove. Each item is encoded separately, so its embeddings do not depend on other items in the step.
    """

    def __init__(self, model: Model, encoder: MediaEncoder, batch: InputBatch) -> None:
        target = model.kernels.target
        self._model = model
        self._batch = batch
        self.tower = encoder.tower
        self._levels = encoder.levels
        self._largest_items = encoder.largest_items
        self.device = target.device
        self.dtype = target.dtype
        self.hidden_size = model.hidden_size
        self.has_sections = batch.has_sections
        self._is_first = model.stage.layers.start == 0
        self._embeds: dict[str, Tensor] = {}  # by key: [embeds, hidden * (1 + levels)]
        self._places: dict[int, list[MediaPlace]] = {}  # by row, while the prompt is computed
        self._offsets: dict[int, Array] = {}  # likewise: rotary positions, [axes, prompt tokens]
        self._behind = np.zeros(len(batch.num_tokens), np.int64)  # by row: the offset after the prompt
        self._crossed = np.ones(len(batch.num_tokens), np.int32)  # by row: number of tokens that cross-attention reads

    def rehearse(self, limits: EncoderLimits) -> int:
        width = self.hidden_size
        for item in self._largest_items(limits) if self._is_first and self._largest_items else ():
            embeds = self._encode(item)
            width = max(width, embeds.shape[1])
            for group in self._batch.cross_groups:
                blocks = np.zeros(-(-len(embeds) // self._batch.block_size), np.int64)  # the null block
                self._model.store_encoded(embeds, group, upload(blocks, self.device))
        return limits.capacity * width * self.dtype.itemsize

    def install(self, new: NewRequest) -> None:
        row = new.row
        self._places.pop(row, None)
        self._offsets.pop(row, None)
        self._behind[row] = 0
        if new.media:
            self._places[row] = new.media
            self._crossed[row] = new.media[0].crossed
        if new.rotary_positions:
            positions = np.frombuffer(new.rotary_positions, np.int32).reshape(AXES, -1).astype(np.int64)
            self._offsets[row] = positions - np.arange(positions.shape[1])
            self._behind[row] = positions.max() + 1 - positions.shape[1]

    def update(self, step: SchedulerOutput) -> None:
        if step.forgets_all:
            self._embeds.clear()
        for key in step.forget:
            self._embeds.pop(key, None)
        if self._is_first:
            for item in step.encode:
                self._embeds[item.place.key] = self._encode(item, self._slots_of(item.place))

    def place(self, flat: FlatBatch) -> FlatBatch:
        if self.has_sections:
            flat.extra_inputs["rotary_offsets"] = self._rotary_offsets(flat)
        if self._batch.cross_groups:
            flat.extra_inputs["crossed"] = self._crossed[flat.rows]
        if not self._places:
            return flat
        placed = _Placed()
        for request, row in enumerate(flat.rows.tolist()):
            if row in self._places:
                self._place_request(flat, request, row, placed)
        if not placed.indices:
            return flat
        hidden = self.hidden_size
        tokens = upload(np.concatenate(placed.indices), self.device)
        embeds = torch.cat(placed.parts) if placed.parts else torch.empty(0, hidden)
        starts = range(hidden, embeds.shape[1], hidden)
        levels = {layer: embeds[:, i : i + hidden] for layer, i in zip(self._levels, starts, strict=True)}
        return replace(flat, media=StepMedia(tokens, embeds[:, :hidden], levels, placed.spans))

    def _place_request(self, flat: FlatBatch, request: int, row: int, placed: _Placed) -> None:
        """Add the embeddings that a request needs in this step."""
        first = int(flat.query_start_loc[request])
        end = int(flat.seq_lens[request])
        start = end - (int(flat.query_start_loc[request + 1]) - first)
        for place in self._places[row]:
            if place.crossed and start == 0:
                self._store(row, place)
            if place.whole and place.start < end and place.end > start:
                place_start = first + place.start - start
                placed.spans.append((max(place_start, first), place_start + place.length))
            for begin, count in place.spans:
                lowest = min(max(start - place.start - begin, 0), count)
                highest = min(max(end - place.start - begin, 0), count)
                if lowest == highest:
                    continue
                skipped = sum(c for b, c in place.spans if b < begin)
                if self._is_first:
                    placed.parts.append(self._embeds[place.key][skipped + lowest : skipped + highest])
                in_step = first + place.start + begin - start
                placed.indices.append(np.arange(in_step + lowest, in_step + highest))
        if end >= self._places[row][-1].end:
            del self._places[row]

    def _store(self, row: int, place: MediaPlace) -> None:
        """Fill the row's cross-attention blocks before its first tokens read them."""
        length = -(-place.crossed // self._batch.block_size)
        for group in self._batch.cross_groups:
            blocks = self._batch.block_tables[group, row, :length].astype(np.int64)
            slots = self._slots(row, place)
            self._model.store_encoded(self._embeds[place.key], group, upload(blocks, self.device), slots)

    def _slots_of(self, place: MediaPlace) -> Tensor | None:
        """Return the adapter slots for an item that a running request needs. All requests with its key have the same
        adapter, see MediaItem.of_adapter."""
        rows = self._places.items() if place.crossed else ()
        return next((self._slots(row, place) for row, places in rows if place in places), None)

    def _slots(self, row: int, place: MediaPlace) -> Tensor | None:
        """Return the slot of a row's adapter for each embedding that cross-attention reads; None if it has no
        adapter."""
        slot = int(self._batch.adapters[row])
        return None if slot < 0 else upload(np.full(place.crossed, slot), self.device)

    def _rotary_offsets(self, flat: FlatBatch) -> Array:
        offsets = np.repeat(self._behind[flat.token_rows][None], AXES, 0)
        if self._offsets:
            for request, row in enumerate(flat.rows.tolist()):
                table = self._offsets.get(row)
                if table is None:
                    continue
                first = int(flat.query_start_loc[request])
                end = int(flat.seq_lens[request])
                start = end - (int(flat.query_start_loc[request + 1]) - first)
                part = table[:, start:end]
                offsets[:, first : first + part.shape[1]] = part
                if end >= table.shape[1]:
                    del self._offsets[row]
        return offsets

    def _encode(self, item: MediaItem, slots: Tensor | None = None) -> Tensor:
        tensors = {name: tensor_of(buffer, self.device) for name, buffer in item.tensors.items()}
        if slots is not None:
            tensors["slots"] = slots
        if item.modality == "embeds":
            levels = len(self._levels) * self.hidden_size
            embeds = torch.nn.functional.pad(tensors["embeds"].to(self.dtype), (0, levels))
        elif self.tower is None:
            raise ValueError("this model takes no pictures")
        else:
            embeds = self.tower(item.modality, tensors)
        if len(embeds) != item.place.num_embeds or embeds.shape[1] % self.hidden_size:
            raise ValueError(
                f"the {item.modality} has embeddings of shape {list(embeds.shape)}, but "
                f"[{item.place.num_embeds}, {self.hidden_size}] was expected"
            )
        return embeds


def tensor_of(buffer: Buffer, device: torch.device) -> Tensor:
    """Return the buffer as a tensor on the device. Integers, such as sizes, stay on the host, which must not wait for
    them."""
    shape: Any = buffer.shape
    data = bytearray(buffer.data)  # torch requires writable memory
    dtype: torch.dtype = getattr(torch, buffer.dtype)
    tensor = torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
    return tensor.to(device) if dtype.is_floating_point else tensor
