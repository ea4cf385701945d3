"""Filling a model's parameters: each checkpoint tensor is read once, lazily, straight into its place."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from quire.layers.build import WeightSlot
from quire.loading.hub import ModelNotFoundError, read_json


class WeightError(ValueError):
    """The checkpoint's tensors are not those of the model. The message names the tensors."""


class SafetensorsCheckpoint:
    """The tensors of a directory's *.safetensors, single or sharded.

    A file is opened for one tensor at a time: a mapping that stays open would count all its pages as ours.
    """

    def __init__(self, directory: Path) -> None:
        index = read_json(directory, "model.safetensors.index.json").get("weight_map")
        if index is not None and not (isinstance(index, dict) and all(isinstance(f, str) for f in index.values())):
            raise WeightError(f"{directory / 'model.safetensors.index.json'} has a weight_map that names no files")
        if index:
            files = sorted({directory / f for f in index.values()})
        elif (single := directory / "model.safetensors").is_file():
            files = [single]  # what lies beside it may be a second copy, such as consolidated.safetensors
        else:
            files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ModelNotFoundError(f"{directory} has no *.safetensors file")
        self.file_of: dict[str, Path] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    self.file_of.update(dict.fromkeys(tensors.keys(), file))
            except (SafetensorError, OSError) as error:
                raise WeightError(f"{file} cannot be read: {error}") from error

    def copy_into(self, slot: WeightSlot) -> None:
        with safe_open(self.file_of[slot.name], framework="pt") as tensors:
            source = tensors.get_slice(slot.name)
            shape = tuple(source.get_shape())
            if shape != slot.shape:
                raise WeightError(f"tensor {slot.name} has shape {shape}, but the model's config asks for {slot.shape}")
            if slot.dim is None:
                part = source[:] if shape else tensors.get_tensor(slot.name)
            elif slot.dim == 0:
                part = source[slot.start : slot.stop]
            else:
                part = source[:, slot.start : slot.stop]
            slot.target.copy_(part)


def load_safetensors(directory: Path, slots: list[WeightSlot], ignored: tuple[str, ...], show_progress: bool) -> None:
    """Fill every slot. Raises WeightError for tensors that are missing, superfluous or misshapen."""
    checkpoint = SafetensorsCheckpoint(directory)
    wanted = {slot.name for slot in slots}
    missing = sorted(wanted - checkpoint.file_of.keys())
    extra = sorted(n for n in checkpoint.file_of.keys() - wanted if not n.endswith(ignored))
    if missing or extra:
        parts = [f"{label}: {_some(names)}" for label, names in (("missing", missing), ("unexpected", extra)) if names]
        raise WeightError(f"the tensors in {directory} are not those of the model; " + "; ".join(parts))
    _fill(slots, checkpoint.copy_into, show_progress, "Loading weights")


def load_dummy(slots: list[WeightSlot], show_progress: bool) -> None:
    """Random weights: norms 1, biases 0, matrices normal with standard deviation 0.02."""
    generator = torch.Generator(slots[0].target.device).manual_seed(0)

    def draw(slot: WeightSlot) -> None:
        if slot.target.dim() == 1:
            slot.target.fill_(0.0 if slot.name.endswith("bias") else 1.0)
        else:
            _normal(slot.target, generator)

    _fill(slots, draw, show_progress, "Drawing weights")


def _normal(target: Tensor, generator: torch.Generator) -> None:
    """A tile of normal values, repeated: drawing every value of a large model would take longer than reading it."""
    tile = torch.randn(2**20 + 1, generator=generator, device=target.device).mul_(0.02).to(target.dtype)
    flat = target.view(-1)
    for start in range(0, flat.numel(), tile.numel()):
        part = flat[start : start + tile.numel()]
        part.copy_(tile[: part.numel()])


def _fill(slots: list[WeightSlot], fill: Callable[[WeightSlot], None], show_progress: bool, label: str) -> None:
    size = sum(slot.target.nbytes for slot in slots)
    hidden = not show_progress or not sys.stderr.isatty() or size < 2**28
    with tqdm(total=size, desc=label, unit="B", unit_scale=True, disable=hidden, leave=False) as bar:
        for slot in slots:
            fill(slot)
            bar.update(slot.target.nbytes)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
