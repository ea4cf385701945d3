"""Compares the tensors of a checkpoint with those that its family expects, without reading or allocating weights."""

import re
from dataclasses import dataclass, replace
from importlib import import_module

import torch

from quire.checkpoints.errors import WeightError
from quire.checkpoints.formats.config import quantization_method
from quire.checkpoints.presented import presented
from quire.checkpoints.weights import Checkpoint, check_shape
from quire.layers.build import Builder, Outline, WeightSlot
from quire.models.decoder import Decoder
from quire.models.description import ModelDescription
from quire.models.load import ignored_tensors
from quire.models.pooler import Pooler
from quire.ops import Kernels, Target
from quire.parallel.mesh import Communicator

_DEVICE = torch.device("meta")


@dataclass(frozen=True)
class TensorFit:
    """count: the number of the checkpoint's tensors. missing, unexpected: names. misshapen: names and both shapes."""

    count: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unexpected or self.misshapen)

    @property
    def share(self) -> float:
        """The share of common names among all names of the checkpoint and of the family."""
        common = self.count - len(self.unexpected)
        return common / max(1, self.count + len(self.missing))


def fit_of(description: ModelDescription, files: Checkpoint) -> TensorFit:
    """files: the checkpoint, or the names of its tensors only. Raises ValueError for a model that cannot be built."""
    fields = description.config
    spec = description.spec
    checkpoint = presented(files, fields)
    if spec.tie_embeddings is None:
        spec = replace(spec, tie_embeddings=not checkpoint.has(f"{spec.names['lm_head']}.weight"))
    method_of = checkpoint.linear_method() or quantization_method(fields, checkpoint.has)
    kernels = Kernels(Target(_DEVICE, torch.bfloat16))
    outline = Outline(Builder(kernels, Communicator(), method_of, shape_of=files.shape_of))
    Decoder(outline, spec, 1)
    if (media := spec.media) is not None:
        import_module(f"quire.models.towers.{media.family}").make(outline, media)
    if description.pooling is not None:
        Pooler(outline, description.pooling.pooler, None)
    ignored = ignored_tensors(spec, fields)
    wanted = {checkpoint.alias(slot.name) for slot in outline.slots}
    extra = (name for name in checkpoint.names.keys() - wanted if not any(re.search(p, name) for p in ignored))
    misshapen = dict.fromkeys(text for slot in outline.slots if (text := _difference(slot, checkpoint)) is not None)
    return TensorFit(
        len(checkpoint.names), tuple(sorted(wanted - checkpoint.names.keys())), tuple(sorted(extra)), tuple(misshapen)
    )


def _difference(slot: WeightSlot, checkpoint: Checkpoint) -> str | None:
    name = checkpoint.alias(slot.name)
    if name not in checkpoint.names:
        return None
    try:
        shape = checkpoint.shape(name)
    except WeightError:  # a format whose tensors differ from the model's
        return None
    try:
        if shape != ():
            check_shape(slot, shape)
    except WeightError:
        return f"{name} has shape {list(shape)}, not {list(slot.shape)}"
    return None
