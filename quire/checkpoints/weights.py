"""Loads weights: each checkpoint tensor is read once, directly into its parameter."""

import json
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from quire.checkpoints.errors import ModelNotFoundError, WeightError
from quire.checkpoints.hub import read_json
from quire.layers.build import Builder, WeightSlot
from quire.layers.linear import LinearMethod
from quire.messages.errors import error_text
from quire.platform.files import FileError, check_regular

Pick = tuple[slice, ...]
Parts = Mapping[str, Sequence[tuple[tuple[int, ...], Pick]]]  # shapes and picks of slots by a checkpoint's names


class Checkpoint(ABC):
    """The tensors of a checkpoint by name. A part of a tensor can be read without reading the whole."""

    names: Mapping[str, Any]  # the keys are the tensors' names

    @abstractmethod
    def read(self, slot: WeightSlot) -> Tensor:
        """The slot's part of its tensor. Raises WeightError if the tensor does not have the slot's shape."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor with one of the `names`. Raises WeightError in formats whose tensors differ from
        the model's."""
        raise WeightError("weights in this format can be replaced from a folder only")

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a model tensor, None if there is none of this name."""
        name = self.alias(name)
        return self.shape(name) if name in self.names else None

    def linear_method(self) -> Callable[[str], LinearMethod] | None:
        """Return the `method_of` of a `Builder`, if the files rather than config.json define how each layer is
        stored."""
        return None

    def alias(self, name: str) -> str:
        """Return the checkpoint's name of a tensor: a model may have been saved without its head, or inside a larger
        model."""
        root, _, bare = name.partition(".")
        names = [name, bare, f"language_model.{name}", f"model.{name}", f"model.language_model.{name}"]
        names.append(f"thinker.{name}")  # of a model that also speaks
        if root == "model":
            names += [f"model.language_model.{bare}", f"model.text_model.{bare}"]
        if name.startswith("vision_tower."):  # nested more deeply by some versions of transformers
            names += [f"vision_tower.vision_model.{bare}", f"model.vision_tower.vision_model.{bare}"]
        return next((n for n in names if n in self.names), name)

    def has(self, name: str) -> bool:
        return self.alias(name) in self.names

    def copy_into(self, slot: WeightSlot) -> None:
        """Copy the slot's part of its tensor into the slot's target.

        Raises WeightError if the shapes differ, or if only one of them is quantized.
        """
        part = self.read(replace(slot, name=self.alias(slot.name)))
        source = part.dtype
        target = slot.target.dtype
        integers = not source.is_floating_point and not target.is_floating_point
        if source != target and not integers and not {source, target} <= _FLOATS:
            raise WeightError(f"tensor {slot.name} is of type {source}, but the model's config asks for {target}")
        part = part.transpose(-1, -2) if slot.transposed else part
        slot.target.copy_(part if slot.shape else part.reshape(()))


_READ_AT_ONCE = 1 << 20  # minimum bytes for one thread to read
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


def pick_of(shape: Sequence[int], pick: Pick, whole: Sequence[int]) -> tuple[slice | int, ...]:
    """Return the pick of a slot with this shape in a tensor, which may have additional leading dimensions of size 1."""
    return (0,) * (len(whole) - len(shape)) + pick


def check_shape(slot: WeightSlot, shape: Sequence[int]) -> None:
    """Check the shape, ignoring leading dimensions of size 1. Raises WeightError."""
    outer = len(shape) - len(slot.shape)
    if outer > 0 and slot.shape and set(shape[:outer]) == {1}:
        shape = shape[outer:]
    if tuple(shape) != slot.shape and not (slot.shape == () and math.prod(shape) == 1):
        raise WeightError(f"tensor {slot.name} has shape {tuple(shape)}, but the model's config asks for {slot.shape}")


def _read(file: Path, begin: int, memory: memoryview) -> bool:
    """Fill the memory with the file's bytes from `begin` on. Returns False if the file is too short."""
    with file.open("rb", buffering=0) as stream:
        stream.seek(begin)
        while memory and (count := stream.readinto(memory)):
            memory = memory[count:]
    return not memory


class SafetensorsCheckpoint(Checkpoint):
    """The tensors of a directory's *.safetensors, single or sharded.

    A file is opened again for each tensor: while a mapping is open, its pages count as this process's memory.
    """

    def __init__(self, directory: Path) -> None:
        self._readers = ThreadPoolExecutor(torch.get_num_threads(), "quire-reader")
        self.names: dict[str, tuple[Path, int]] = {}  # the file, and the offset of the tensor's bytes in it
        for file in weight_files(directory, "model.safetensors", "*.safetensors"):
            try:
                with safe_open(file, framework="pt"):  # checks the header
                    self.names.update((name, (file, begin)) for name, begin in _places(file))
            except (SafetensorError, OSError) as error:
                raise WeightError(f"{file} cannot be read: {error_text(error)}") from error

    def copy_into(self, slot: WeightSlot) -> None:
        """Read the bytes directly into the target if its layout is the file's. All threads take part, because copying
        bytes and faulting in new pages keeps more than one thread busy."""
        name = self.alias(slot.name)
        target = slot.target
        file, begin = self.names[name]
        with safe_open(file, framework="pt") as tensors:
            source = tensors.get_slice(name)
            same_type = _SAFETENSORS_TYPES.get(source.get_dtype()) is target.dtype
        whole_rows = all(s == slice(0, n) for s, n in zip(slot.pick[1:], slot.shape[1:], strict=False))
        first_row, _, step = slot.pick[0].indices(slot.shape[0]) if slot.pick else (0, 0, 1)
        direct = same_type and whole_rows and step == 1 and slot.shape and not slot.transposed
        if not direct or not target.is_contiguous() or target.device.type != "cpu" or not target.numel():
            return super().copy_into(slot)
        check_shape(slot, source.get_shape())
        row_bytes = math.prod(slot.shape[1:]) * target.element_size()
        memory = memoryview(target.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        begin += first_row * row_bytes
        size = max(-(-len(memory) // torch.get_num_threads()), _READ_AT_ONCE)
        parts = [(file, begin + start, memory[start : start + size]) for start in range(0, len(memory), size)]
        complete = [_read(*parts[0])] if len(parts) == 1 else self._readers.map(_read, *zip(*parts, strict=True))
        if not all(complete):
            raise WeightError(f"{file} ends within tensor {name}")
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self.names[name][0], framework="pt") as tensors:
            return tuple(tensors.get_slice(name).get_shape())

    def read(self, slot: WeightSlot) -> Tensor:
        with safe_open(self.names[slot.name][0], framework="pt") as tensors:
            source = tensors.get_slice(slot.name)
            shape = source.get_shape()
            check_shape(slot, shape)
            if not slot.pick or len(shape) > len(slot.shape) or any(s.step not in (None, 1) for s in slot.pick):
                whole: Tensor = tensors.get_tensor(slot.name)
                return whole[pick_of(slot.shape, slot.pick, shape)]
            part: Tensor = source[slot.pick]
            return part


_SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}


def _places(file: Path) -> Iterator[tuple[str, int]]:
    """Return the names of the tensors, and the offsets of their bytes. Format:
    https://huggingface.co/docs/safetensors"""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return ((name, 8 + size + entry["data_offsets"][0]) for name, entry in header.items())


class TorchCheckpoint(Checkpoint):
    """The tensors of a torch file or of those in a directory, memory-mapped. Only torch's restricted unpickler reads
    them."""

    def __init__(self, path: Path) -> None:
        self.names: dict[str, Tensor] = {}
        for file in [check_regular(path)] if path.is_file() else _torch_files(path):
            try:
                tensors = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
            except Exception as error:  # a pickle can fail in any way
                found = re.search(r"GLOBAL (\S+)", error_text(error))
                needs = f"it needs the Python object {found[1]}; save the model as *.safetensors" if found else ""
                raise WeightError(
                    f"{file} cannot be read safely: {needs or error_text(error).splitlines()[0]}"
                ) from error
            if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
                raise WeightError(f"{file} is no table of tensors")
            self.names.update(tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.names[name].shape)

    def read(self, slot: WeightSlot) -> Tensor:
        tensor = self.names[slot.name]
        check_shape(slot, tensor.shape)
        return tensor[pick_of(slot.shape, slot.pick, tensor.shape)]


def parts_of(checkpoint: Checkpoint, builder: Builder) -> Parts:
    """Return the parts of the tensors that the slots of `builder` need."""
    parts: dict[str, list[tuple[tuple[int, ...], Pick]]] = {}
    for slot in builder.slots:
        parts.setdefault(checkpoint.alias(slot.name), []).append((slot.shape, slot.pick))
    return parts


def weight_files(directory: Path, single: str, pattern: str) -> list[Path]:
    """Return the files that the index lists, in the directory or one next to it. Without an index: the file `single`,
    or else all files that match the pattern. All must be regular files. Raises WeightError."""
    try:
        return [check_regular(file) for file in _weight_files(directory, single, pattern)]
    except FileError as error:
        raise WeightError(error_text(error)) from error


def _weight_files(directory: Path, single: str, pattern: str) -> list[Path]:
    index = read_json(directory, f"{single}.index.json").get("weight_map")
    if index is not None and not (isinstance(index, dict) and all(isinstance(f, str) for f in index.values())):
        raise WeightError(f"{directory / f'{single}.index.json'} has a weight_map that does not map to file names")
    for file in map(Path, (index or {}).values()):
        if file.is_absolute() or ".." in file.parts[1:]:  # checked without resolving links, which the hub's cache uses
            raise WeightError(f"{directory / f'{single}.index.json'} names {file}, which is outside {directory.parent}")
    if index:
        return sorted({directory / f for f in index.values()})
    if (directory / single).exists():  # other files may be duplicates, such as consolidated.safetensors
        return [directory / single]
    return sorted(directory.glob(pattern))


def _torch_files(directory: Path) -> list[Path]:
    found = weight_files(directory, "pytorch_model.bin", "pytorch_model*.bin")
    return found or list(directory.glob("medusa_lm_head.pt"))  # the heads of FasterDecoding/medusa-*


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open the *.safetensors files or, if there are none, torch's files. Raises ModelNotFoundError or WeightError."""
    if weight_files(directory, "model.safetensors", "*.safetensors"):
        return SafetensorsCheckpoint(directory)
    if _torch_files(directory):
        return TorchCheckpoint(directory)
    raise ModelNotFoundError(f"{directory} has no *.safetensors and no pytorch_model*.bin file")


def load_weights(
    checkpoint: Checkpoint,
    builder: Builder,
    ignored: tuple[str, ...],
    show_progress: bool,
    elsewhere: Iterable[str] = (),
    is_restored: bool = False,
) -> None:
    """Fill every slot of `builder`. ignored: patterns for the names of tensors that are not parameters. elsewhere: the
    tensors of other pipeline stages. is_restored: see Builder.fill.

    Raises WeightError for tensors that are missing, unexpected, or have a wrong shape or type.
    """
    wanted = {checkpoint.alias(slot.name) for slot in builder.slots}
    missing = sorted(wanted - checkpoint.names.keys())
    known = wanted.union(map(checkpoint.alias, elsewhere))
    extra = sorted(n for n in checkpoint.names.keys() - known if not any(re.search(p, n) for p in ignored))
    if missing or extra:
        parts = [f"{label}: {_some(names)}" for label, names in (("missing", missing), ("unexpected", extra)) if names]
        raise WeightError("the checkpoint's tensors do not fit the model; " + "; ".join(parts))
    _fill(builder, checkpoint.copy_into, show_progress, "Loading weights", is_restored)


def load_dummy(builder: Builder, show_progress: bool) -> None:
    """Fill every slot with dummy weights: norms 1, biases 0, matrices normal with standard deviation 0.02."""
    generator = torch.Generator(builder.device).manual_seed(0)

    def draw(slot: WeightSlot) -> None:
        if not slot.target.is_floating_point():
            slot.target.zero_()
        elif slot.target.dim() == 1:
            slot.target.fill_(0.0 if slot.name.endswith("bias") else 1.0)
        else:
            _normal(slot.target, generator)

    _fill(builder, draw, show_progress, "Drawing weights")


def _normal(target: Tensor, generator: torch.Generator) -> None:
    """Repeat one tile of normal values: drawing every value of a large model would take longer than reading it."""
    if not target.is_contiguous():  # such as the gates of experts that are fused with the up projections
        for part in target:
            _normal(part, generator)
        return
    tile = torch.randn(2**20 + 1, generator=generator, device=target.device).mul_(0.02).to(target.dtype)
    flat = target.view(-1)
    tiles, rest = divmod(flat.numel(), tile.numel())
    flat[: tiles * tile.numel()].view(tiles, tile.numel()).copy_(tile)
    flat[tiles * tile.numel() :].copy_(tile[:rest])


def _fill(
    builder: Builder, fill: Callable[[WeightSlot], None], show_progress: bool, label: str, is_restored: bool = False
) -> None:
    size = sum(slot.target.nbytes for slot in builder.slots)
    hidden = not show_progress or not sys.stderr.isatty() or size < 2**28
    with tqdm(total=size, desc=label, unit="B", unit_scale=True, disable=hidden, leave=False) as bar:

        def fill_one(slot: WeightSlot) -> None:
            fill(slot)
            bar.update(slot.target.nbytes)

        builder.fill(fill_one, is_restored)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
