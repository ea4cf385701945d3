"""The tensors of a quantized checkpoint: those that Quire's linear layers read, and those that transformers loads."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.checkpoints.formats.config import quantization_kind, quantization_method
from quire.checkpoints.presented import presented
from quire.checkpoints.weights import Checkpoint, open_checkpoint
from quire.layers.build import WeightSlot
from quire.layers.linear import DenseWeight, LinearMethod
from quire.models.spec import HfConfig


@dataclass(frozen=True)
class QuantizedTensors:
    """files: as stored. checkpoint: in the form that the schemes read. method_of: see Builder."""

    files: Checkpoint
    checkpoint: Checkpoint
    method_of: Callable[[str], LinearMethod]

    def has(self, name: str) -> bool:
        """Whether a tensor belongs to a quantized layer. name: in the model or in the checkpoint."""
        parts = name.split(".")
        layers = (".".join(parts[:count]) for count in range(1, len(parts)))
        return any(self.method_of(layer) is not DenseWeight for layer in layers)

    def dense_tensors(self) -> dict[str, Tensor]:
        def read(name: str) -> Tensor:
            return self.files.read(WeightSlot(name, torch.empty(0), self.files.shape(name)))

        return {name: read(name) for name in self.files.names if not self.has(name)}


def quantized_tensors(folder: Path, config: HfConfig) -> QuantizedTensors | None:
    """Return the tensors of a checkpoint with this config.json, None if it is not quantized. Raises WeightError, and
    ValueError for an unsupported format."""
    if quantization_kind(config) is None:
        return None
    files = open_checkpoint(folder)
    checkpoint = presented(files, config)
    method_of = checkpoint.linear_method() or quantization_method(config, checkpoint.has)
    return QuantizedTensors(files, checkpoint, method_of)
