"""Checkpoints of bitsandbytes (LLM.int8(), arXiv:2208.07339, and QLoRA, arXiv:2305.14314), read without the package."""

import json
from typing import Any

import torch
from torch import Tensor

from quire.checkpoints.errors import WeightError
from quire.checkpoints.formats.tables import BITSANDBYTES_BLOCK
from quire.checkpoints.weights import Checkpoint
from quire.layers.build import WeightSlot
from quire.messages.errors import error_text

_STATE = ".weight.quant_state.bitsandbytes__"


class BitsAndBytesCheckpoint(Checkpoint):
    """Wraps another checkpoint and presents its layers in the forms of `TableCodes` and `ScaledBytes`.

    Four bits: weight: uint8 [ceil(out * in / 2), 1], with two codes per byte, the first in the high half; the rows of
    the weight follow each other. weight.absmax: the scale of each block of weights in that order or, with double
    quantization, its code; then weight.nested_quant_map [256] has the codes' values, weight.nested_absmax their scales,
    and the offset is in the JSON of weight.quant_state. Eight bits: weight: int8 [out, in]; SCB: [out], 127 times the
    scales.
    """

    def __init__(self, inner: Checkpoint) -> None:
        self.inner = inner
        self.states = {name.partition(_STATE)[0]: name for name in inner.names if _STATE in name}
        self.bytes = {name.removesuffix(".SCB") for name in inner.names if name.endswith(".SCB")}
        own = {f"{layer}.weight" for layer in self.states} | {f"{layer}.weight_format" for layer in self.bytes}
        names = {name for name in inner.names if name not in own and not name.endswith(".SCB")}
        names = {name for name in names if name.partition(".weight.")[0] not in self.states}
        names |= {f"{layer}.{end}" for layer in self.states for end in ("weight_packed", "weight_scale")}
        self.names: dict[str, None] = dict.fromkeys([*names, *(f"{layer}.weight_scale" for layer in self.bytes)])

    def read(self, slot: WeightSlot) -> Tensor:
        layer, _, part = slot.name.rpartition(".")
        if layer in self.states and part in ("weight_packed", "weight_scale"):
            state = self._state(layer)
            shape = tuple(state["shape"])
            width = -(-shape[1] // 2) if part == "weight_packed" else slot.shape[-1]
            if slot.shape != (shape[0], width):
                raise WeightError(f"tensor {layer}.weight has shape {shape}, but the model's config asks for others")
            whole = self._codes(layer, shape) if part == "weight_packed" else self._scales(layer, state, width)
            return whole[slot.pick]
        if layer in self.bytes and part == "weight_scale":
            return self._whole(f"{layer}.SCB").view(-1, 1)[slot.pick] / 127
        return self.inner.read(slot)

    def _whole(self, name: str) -> Tensor:
        shape = self.inner.shape(name)
        return self.inner.read(WeightSlot(name, torch.empty(0), shape))

    def _state(self, layer: str) -> dict[str, Any]:
        text = bytes(self._whole(self.states[layer]).tolist())
        try:
            state = json.loads(text)
            if len(state["shape"]) != 2 or state["blocksize"] % BITSANDBYTES_BLOCK:
                raise ValueError(f"shape {state['shape']}, blocks of {state['blocksize']}")
        except (ValueError, KeyError, TypeError) as error:
            raise WeightError(f"{self.states[layer]} is not supported: {error_text(error)}") from error
        return dict(state)

    def _codes(self, layer: str, shape: tuple[int, ...]) -> Tensor:
        packed = self._whole(f"{layer}.weight").flatten()
        if shape[1] % 2 == 0:
            return (packed >> 4 | packed << 4).view(shape[0], -1)
        codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()[: shape[0] * shape[1]].view(shape)
        codes = torch.nn.functional.pad(codes, (0, 1))
        return codes[:, ::2] | codes[:, 1::2] << 4

    def _scales(self, layer: str, state: dict[str, Any], groups: int) -> Tensor:
        """Return the scales [out, groups]. A group is a part of a block if rows do not consist of whole blocks."""
        absmax = self._whole(f"{layer}.weight.absmax")
        if "nested_offset" in state:
            outer = self._whole(f"{layer}.weight.nested_absmax").repeat_interleave(state["nested_blocksize"])
            absmax = self._whole(f"{layer}.weight.nested_quant_map")[absmax.int()] * outer[: len(absmax)]
            absmax = absmax + state["nested_offset"]
        rows, width = state["shape"]
        first = torch.arange(rows)[:, None] * width + torch.arange(groups) * (width // groups)
        return absmax.float()[first // state["blocksize"]]
