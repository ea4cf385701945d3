"""The weights of a GGUF file as a checkpoint in the Hugging Face layout."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quire.checkpoints.errors import WeightError
from quire.checkpoints.formats.gguf import GGUF, dequantize
from quire.checkpoints.formats.gguf_types import TYPES, TensorType
from quire.checkpoints.gguf import Stored
from quire.checkpoints.weights import Checkpoint
from quire.layers.build import WeightSlot
from quire.layers.linear import DenseWeight, LinearMethod
from quire.ops.cpu.build import CODES
from quire.ops.cpu.gguf_blocks import can_decode, put_values

_CHUNK = 2**24  # elements dequantized at a time when a tensor is read as floats


class GgufCheckpoint(Checkpoint):
    """The tensors by their names in the Hugging Face layout.

    A uint8 target receives the bytes of quantized rows. Any other target receives floats, dequantized if necessary.
    """

    names: dict[str, Stored]

    def __init__(self, names: dict[str, Stored]) -> None:
        self.names = names

    def linear_method(self) -> Callable[[str], LinearMethod]:
        """Return the `method_of` of a `Builder`. All layers use the same method, which finds the type of each
        tensor."""
        linear = (s for n, s in self.names.items() if not n.startswith("model.embed_tokens"))
        method = DenseWeight if all(s.tensor.kind.is_float for s in linear) else GGUF(self._type_of, self._scale_of)
        return lambda name: method

    def _type_of(self, name: str) -> TensorType:
        stored = self.names.get(self.alias(name))
        return TYPES[0] if stored is None else stored.tensor.kind  # `load_weights` reports a missing tensor

    def _scale_of(self, name: str) -> float:
        return self.names[self.alias(name)].factor

    def read(self, slot: WeightSlot) -> Tensor:
        stored = self.names[slot.name]
        as_bytes = slot.target.dtype == torch.uint8
        shape = (*stored.shape[:-1], stored.tensor.row_bytes) if as_bytes else stored.shape
        if [n for n in shape if n > 1] != [n for n in slot.shape if n > 1]:  # ggml drops dimensions of size 1
            raise WeightError(f"tensor {slot.name} has shape {shape}, but the model's config asks for {slot.shape}")
        first = slot.pick[0] if slot.pick else slice(0, slot.shape[0])
        data = torch.from_numpy(stored.rows(first.start, first.stop))
        if not as_bytes:
            data = dequantize(stored.tensor.kind, data).float() * stored.factor + stored.shift
        return data.view(-1, *slot.shape[1:])[:, *slot.pick[1:]]

    def copy_into(self, slot: WeightSlot) -> None:
        """Copy the rows in chunks, since a whole embedding table in float32 would be large."""
        start, stop = (slot.pick[0].start, slot.pick[0].stop) if slot.pick else (0, slot.shape[0])
        step = max(1, _CHUNK // math.prod(slot.shape[1:]))
        for first in range(start, stop, step):
            end = min(first + step, stop)
            pick = (slice(first, end), *slot.pick[1:])
            part = replace(slot, target=slot.target[first - start : end - start], pick=pick)
            if not self._put_directly(part, slice(first, end)):
                super().copy_into(part)

    def _put_directly(self, slot: WeightSlot, rows: slice) -> bool:
        """Read or decode whole rows into the slot's target, if this needs no further copy."""
        stored = self.names[self.alias(slot.name)]
        target = slot.target
        kind = stored.tensor.kind
        width = slot.shape[-1]
        whole = len(stored.shape) == len(slot.shape) == 2 and slot.pick[1:] in ((), (slice(0, width),))
        if not whole or slot.transposed or not target.is_contiguous() or target.device.type != "cpu":
            return False
        if target.dtype == torch.uint8 and slot.shape == (stored.shape[0], stored.tensor.row_bytes):
            return stored.fill(rows.start, memoryview(target.view(-1).numpy()))  # type: ignore[arg-type]
        if slot.shape != stored.shape or target.dtype not in CODES or not can_decode(kind.name, target):
            return False
        blocks = torch.from_numpy(stored.rows(rows.start, rows.stop)).view(len(target), -1, kind.nbytes)
        put_values(kind.name, blocks, stored.factor, stored.shift, target)
        return True
