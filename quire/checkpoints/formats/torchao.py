"""Weights quantized by torchao (https://github.com/pytorch/ao), as transformers saves them, without the package."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quire.checkpoints.errors import WeightError
from quire.checkpoints.formats.packing import integer_matrix, narrow, unpack
from quire.checkpoints.formats.scaled import ScaledBytes
from quire.checkpoints.formats.scheme import Groups, Scheme, slot
from quire.checkpoints.formats.settings import SchemeOf, Settings
from quire.checkpoints.weights import Checkpoint, SafetensorsCheckpoint, check_shape
from quire.layers.build import Builder, WeightSlot
from quire.layers.linear import DenseWeight, LinearMethod, LinearShape
from quire.layers.specs import OutputPart
from quire.ops.reference.quantized import QuantizedMatrix

_BYTES = {"Int8Tensor": torch.int8, "IntxUnpackedToInt8Tensor": torch.int8, "Float8Tensor": torch.float8_e4m3fn}
_FOUR_BITS = ("Int4Tensor", "Int4TilePackedTo4dTensor")
_ENDS = ("qdata", "scale", "zero_point", "scale_and_zero", "act_pre_scale", "act_quant_scale", "act_quant_zero_point")
_PARTS = {"qdata": "weight", "scale": "weight_scale", "zero_point": "weight_zero_point"}  # the names in ScaledBytes


@dataclass(frozen=True)
class CentredIntegers(Scheme):
    """weight = (code - 8) * scale + zero. weight_codes: uint8 [out, in], of four bits; weight_scale, weight_zero: [out,
    groups]."""

    group: int
    marker = "weight_codes"

    def inputs_together(self, name: str) -> int:
        return self.group

    def load(self, builder: Builder, shape: LinearShape, part: OutputPart) -> Callable[[], QuantizedMatrix]:
        name = part.name
        outputs = slice(part.start, part.stop)
        inputs = slice(shape.start, shape.stop)
        groups = Groups.of(shape, self.group)
        codes = slot(builder, f"{name}.weight_codes", torch.uint8, (part.rows, shape.in_features), outputs, inputs)
        whole = part.rows, groups.count
        scale = slot(builder, f"{name}.weight_scale", torch.float32, whole, outputs, groups.picked)
        zero = slot(builder, f"{name}.weight_zero", torch.float32, whole, outputs, groups.picked)

        def make() -> QuantizedMatrix:
            scales = groups.spread(scale).contiguous()
            zeros = groups.spread(zero).contiguous()
            offsets = narrow(zeros - 8 * scales) if zeros.any() else None
            return integer_matrix(codes, 4, scales, groups.size, offsets=offsets)

        return make


@dataclass(frozen=True)
class _Layer:
    """A quantized weight. kind: torchao's class. fields: of its object. tensors: the names of its tensors."""

    kind: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, str]
    shape: tuple[int, int]

    @property
    def scheme(self) -> Scheme:
        block = self.fields.get("block_size") or self.shape
        if self.kind in _FOUR_BITS:
            return CentredIntegers(block[-1])
        rows, columns = (-1 if size >= whole else size for size, whole in zip(block, self.shape, strict=True))
        return ScaledBytes(_BYTES[self.kind], (rows, columns), symmetric="zero_point" not in self.tensors)

    @property
    def parts(self) -> dict[str, str | None]:
        """Return the scheme's tensor names, each with the file's tensor of the same content."""
        if self.kind in _FOUR_BITS:
            return dict.fromkeys(("weight_codes", "weight_scale", "weight_zero"))
        return {part: self.tensors[name] for name, part in _PARTS.items() if name in self.tensors}


class TorchaoCheckpoint(Checkpoint):
    """Wraps another checkpoint and presents its layers in the forms of `ScaledBytes` and `CentredIntegers`.

    A file's metadata contain the class and the fields of each quantized tensor. The tensors of `layer.weight` are
    called layer._weight_qdata, layer._weight_scale and so on, and by torchao 0.14 layer.weight:qdata, with all others
    called name:_data. Activations are never quantized, even if the fields request it: this is more accurate.

    Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor: qdata: [out, in]; scale, zero_point: one for each block.
    Int4Tensor: qdata: signed numbers of four bits, [out, in / 2]; scale, zero_point: [groups, out].
    Int4TilePackedTo4dTensor: qdata: [out / 8, in / (16 k), 32, k / 2], see `_tiles`; scale_and_zero: [groups, out, 2].
    """

    def __init__(self, inner: Checkpoint) -> None:
        if not isinstance(inner, SafetensorsCheckpoint):
            raise WeightError(
                "checkpoints quantized with torchao are read from *.safetensors only; save the model "
                "with transformers 5 and torchao 0.15 or newer"
            )
        self.inner = inner
        self.layers: dict[str, _Layer] = {}
        self.names: dict[str, str | None] = {name.removesuffix(":_data"): name for name in inner.names}
        for name, entry in self._metadata().items():
            self._add(name, entry)

    def _metadata(self) -> dict[str, dict[str, Any]]:
        """Return the metadata of each tensor, by its name."""
        entries: dict[str, Any] = {}
        try:
            for file in {file for file, _ in self.inner.names.values()}:
                with safe_open(file, framework="pt") as tensors:
                    stored = tensors.metadata() or {}
                names = json.loads(stored.get("tensor_names", "[]"))
                entries |= {name: json.loads(stored[name]) for name in names if name in stored}
            return {name: entry for name, entry in entries.items() if entry["_type"] != "Tensor"}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise WeightError(f"the metadata of torchao's tensors cannot be read: {error!r}") from error

    def _add(self, name: str, entry: dict[str, Any]) -> None:
        kind = entry["_type"]
        fields = entry.get("_data") or {}
        if not isinstance(fields, dict):
            raise WeightError(f"tensor {name} has _data={fields!r}, which has no fields")
        layer, _, parameter = name.rpartition(".")
        begins = (f"{layer}._{parameter}_", f"{name}:")
        tensors = {end: begin + end for begin in begins for end in _ENDS if begin + end in self.inner.names}
        if kind not in (*_BYTES, *_FOUR_BITS) or parameter != "weight":
            listed = ", ".join([*_BYTES, *_FOUR_BITS])
            raise WeightError(
                f"tensor {name} has _type={kind!r}, which is not supported; supported: {listed}, of "
                "weights of linear layers"
            )
        if "act_pre_scale" in tensors:
            raise WeightError(f"tensor {name} has act_pre_scale, a scale of its inputs, which is not supported")
        if missing := {"qdata", "scale_and_zero" if kind == "Int4TilePackedTo4dTensor" else "scale"} - tensors.keys():
            raise WeightError(f"tensor {name} ({kind}) lacks {', '.join(sorted(missing))}")
        shape = fields.get("shape") or self.inner.shape(tensors["qdata"])
        for field, sizes in (("shape", shape), ("block_size", fields.get("block_size") or shape)):
            if not _is_pair(sizes):
                raise WeightError(f"tensor {name} has {field}={sizes!r}, but a weight has two sizes")
        self.layers[layer] = made = _Layer(kind, fields, tensors, tuple(shape))
        for raw in tensors.values():
            del self.names[raw]
        self.names |= {f"{layer}.{part}": raw for part, raw in made.parts.items()}

    def linear_method(self) -> Callable[[str], LinearMethod]:
        def method_of(name: str) -> LinearMethod:
            layer = self.layers.get(self.alias(f"{name}.weight_scale").removesuffix(".weight_scale"))
            return DenseWeight if layer is None else layer.scheme

        return method_of

    def copy_into(self, slot: WeightSlot) -> None:
        raw = self.names[self.alias(slot.name)]
        if raw is None:
            super().copy_into(slot)
        else:
            self.inner.copy_into(replace(slot, name=raw))

    def read(self, slot: WeightSlot) -> Tensor:
        layer, _, part = slot.name.rpartition(".")
        raw = self.names[slot.name]
        if raw is not None:
            return self.inner.read(replace(slot, name=raw))
        whole = self._four_bits(self.layers[layer], part)
        check_shape(slot, whole.shape)
        return whole[slot.pick]

    def _four_bits(self, layer: _Layer, part: str) -> Tensor:
        """Return a tensor in the form of CentredIntegers."""
        plain, (outputs, inputs) = layer.kind == "Int4Tensor", layer.shape
        if part == "weight_codes":
            stored = self._whole(layer.tensors["qdata"])
            if not plain and (stored.dim() != 4 or stored.shape[2] != 32):
                shape = tuple(stored.shape)
                raise WeightError(f"tensor {layer.tensors['qdata']} has shape {shape}, which are no tiles")
            if not plain:
                return _tiles(stored)[:outputs, :inputs]
            pairs = stored.view(torch.uint8)
            return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1) ^ 8  # signed to centred
        if plain:
            return self._whole(layer.tensors["scale" if part == "weight_scale" else "zero_point"]).t()
        groups = -(-inputs // layer.scheme.inputs_together(""))  # torchao has padded the inputs
        return self._whole(layer.tensors["scale_and_zero"])[:groups, :outputs, int(part == "weight_zero")].t()

    def _whole(self, name: str) -> Tensor:
        return self.inner.read(WeightSlot(name, torch.empty(0), self.inner.shape(name)))


def _is_pair(sizes: object) -> bool:
    return isinstance(sizes, list | tuple) and len(sizes) == 2 and all(isinstance(n, int) and n for n in sizes)


def _tiles(words: Tensor) -> Tensor:
    """Return the codes of PyTorch's `_convert_weight_to_int4pack`: int32 [out / 8, in / (16 k), 32, k / 2] -> uint8
    [out, in].

    Words are in the order of the threads of a warp, which multiply k adjacent tiles of 16 inputs and 8 outputs. A word
    contains codes of one output, from two tiles. In binary, let i4 i3 i2 i1 i0 be the input's index in these tiles and
    o2 o1 o0 the output's. The thread is o2 o1 o0 i2 i1, and the position in the word i0 i4 i3.
    """
    fields = unpack(words.flatten(1), 4, words[0].numel() * 8).view(*words.shape[:2], 8, 4, -1, 2, 2, 2)
    return fields.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(len(words) * 8, -1)


def scheme_of(settings: Settings) -> SchemeOf:
    def scheme_of_layer(name: str) -> Scheme:
        raise ValueError(
            "quant_method='torchao': only the checkpoint says how a layer is quantized; load it without "
            "load_format='dummy'"
        )

    return scheme_of_layer
