"""The tensor types of GGUF files: names and block sizes. The decoders are in gguf.py."""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TensorType:
    """A tensor type, whose blocks contain `elements` elements in `nbytes` bytes."""

    name: str
    elements: int
    nbytes: int

    @property
    def is_float(self) -> bool:
        return self.elements == 1


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TYPES = {row["number"]: TensorType(name, row["elements"], row["nbytes"]) for name, row in _TABLE.items()}  # by number
