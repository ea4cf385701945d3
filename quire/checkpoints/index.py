"""The tensors that an index of weights lists. Their files need not be present."""

from pathlib import Path

from torch import Tensor

from quire.checkpoints.errors import WeightError
from quire.checkpoints.hub import INDEXES, read_json
from quire.checkpoints.weights import Checkpoint, SafetensorsCheckpoint
from quire.layers.build import WeightSlot


class IndexedNames(Checkpoint):
    """Names of tensors without their shapes or contents."""

    def __init__(self, names: dict[str, str]) -> None:
        """names: the file of each tensor."""
        self.names = names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return (), the shape of an unknown tensor."""
        return ()

    def read(self, slot: WeightSlot) -> Tensor:
        raise WeightError(f"only the name of {slot.name} is known")


def known_tensors(directory: Path) -> Checkpoint | None:
    """Return the tensors of a directory with safetensors files or their beginnings, or with an index only. None if
    neither is there. Raises WeightError for a damaged file or index."""
    for name in INDEXES:
        index = read_json(directory, name).get("weight_map")
        if index is None:
            continue
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise WeightError(f"{directory / name} has a weight_map that does not map to file names")
        if any(not (directory / file).exists() for file in index.values()):
            return IndexedNames(index)
    found = SafetensorsCheckpoint(directory)
    return found if found.names else None
