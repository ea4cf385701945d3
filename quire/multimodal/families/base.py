"""What a family of models has to say about its pictures and sounds."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from PIL import Image

from quire.multimodal.preprocessing import Array

Config = Mapping[str, Any]
Encode = Callable[[str], list[int]]  # a text without special tokens of its own


@dataclass(frozen=True)
class Prepared:
    """One item, ready for the encoder.

    tensors: by the names that the tower knows. text: what stands for it in the prompt, in place of its placeholder.
    num_embeds: how many tokens of that text take embeddings. grid: (time, height, width) in embeddings, for models with
    several rotary positions. seconds: between the steps of the grid in time.
    """

    tensors: dict[str, Array]
    text: str
    num_embeds: int
    grid: tuple[int, int, int] = (1, 1, 1)
    seconds: float = 1.0


@dataclass(frozen=True)
class Frames:
    """A video: its frames, and how many of them there are in a second."""

    images: list[Image.Image]
    fps: float = 1.0


@dataclass(frozen=True)
class Kind:
    """A modality of a model. placeholder: the text that stands for one item in a prompt. token_id: of the tokens that
    take embeddings."""

    placeholder: str
    token_id: int


@dataclass(frozen=True)
class Placed:
    """An item in a prompt: the positions of its embeddings."""

    positions: Sequence[int]
    item: Prepared


class Family(ABC):
    """Preprocessing of one model's pictures or sounds. A family has the methods of its kinds: `image`, `video` or
    `audio`. A request with another modality is refused before (`MediaProcessor.check_count`), so those are not called.

    whole: whether the tokens of a picture see each other in both directions. crossed: how many embeddings the model
    reads by cross-attention; then a prompt has one item, and no token stands for it. sample_rate: of sounds.
    adjustable: the settings that a request may change, such as "size.longest_edge", and the largest number that it may
    be, or None for a switch. None of them changes what the encoder was made for, or makes items larger than the
    checkpoint and the options allow.
    """

    kinds: dict[str, Kind] = field(default_factory=dict)
    whole = False
    crossed = 0
    sample_rate = 0
    adjustable: Mapping[str, int | None] = MappingProxyType({})

    @abstractmethod
    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        """config: the checkpoint's config.json. settings: of its processor, with the user's changes. token: the text of
        a token id."""

    def image(self, image: Image.Image) -> Prepared:
        """image: in RGB. Raises MediaError if the model cannot see it."""
        raise NotImplementedError

    def video(self, frames: Frames) -> Prepared:
        raise NotImplementedError

    def audio(self, samples: Array) -> Prepared:
        """samples: float32, `sample_rate` a second. Raises MediaError if the model cannot hear it."""
        raise NotImplementedError

    def rotary_positions(self, token_ids: list[int], placed: Sequence[Placed]) -> Array | None:
        """[axes, tokens], int32, if they are not those of the tokens."""
        return None
