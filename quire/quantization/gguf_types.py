"""The tensor types of GGUF files: names and block sizes. The decoders are in gguf.py."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorType:
    """A tensor type, whose blocks have `elements` elements in `nbytes` bytes."""

    name: str
    elements: int
    nbytes: int

    @property
    def is_float(self) -> bool:
        return self.elements == 1


_SIZES = [  # number in the file, name, elements of a block, bytes of a block
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (30, "BF16", 1, 2),
]
TYPES = {number: TensorType(name, elements, nbytes) for number, name, elements, nbytes in _SIZES}
