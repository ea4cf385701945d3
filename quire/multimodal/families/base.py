"""The interface of a model family's image and audio preprocessing."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from PIL import Image

from quire.multimodal.pictures import MediaError
from quire.multimodal.preprocessing import Array

Config = Mapping[str, Any]
MOST_ITEMS = 999  # of a modality in a prompt, unless limit_mm_per_prompt is set, as in vLLM
Encode = Callable[[str], list[int]]  # encodes a text without adding special tokens


@dataclass(frozen=True)
class Prepared:
    """One item, ready for the encoder.

    tensors: by the tower's names. text: replaces its placeholder in the prompt. num_embeds: the number of tokens in
    that text that are replaced by embeddings. grid: (time, height, width) in embeddings, for models with several rotary
    positions. seconds: between the steps of the grid in time. rotary: the positions [axes, tokens] of the first to the
    last token that has other ones than text, if a grid does not define them. They are relative to the position of a
    text token in the first one's place. lead: the number of these tokens before the first embedding. numbered: where
    the text contains the item's number in the prompt: the text before it, and the number of the first item, which
    `text` has.
    """

    tensors: dict[str, Array]
    text: str
    num_embeds: int
    grid: tuple[int, int, int] = (1, 1, 1)
    seconds: float = 1.0
    rotary: Array | None = None
    lead: int = 0
    numbered: tuple[str, int] | None = None

    def text_at(self, index: int) -> str:
        """Return the text of the item if it is the prompt's item with this index."""
        if self.numbered is None or index == 0:
            return self.text
        before, first = self.numbered
        return f"{before}{first + index}{self.text[len(before) + len(str(first)) :]}"


@dataclass(frozen=True)
class Frames:
    """A video: its frames, and their number per second."""

    images: list[Image.Image]
    fps: float = 1.0


@dataclass(frozen=True)
class Kind:
    """A modality of a model. placeholder: the text that represents one item in a prompt. token_id: of the tokens that
    are replaced by embeddings. most: of the items in a prompt."""

    placeholder: str
    token_id: int
    most: int = MOST_ITEMS


@dataclass(frozen=True)
class Placed:
    """An item in a prompt: the positions of its embeddings."""

    positions: Sequence[int]
    item: Prepared


class Family(ABC):
    """Preprocessing of one model's pictures or sounds. A family implements the methods of its modalities: `image`,
    `video` or `audio`. Requests with other modalities are rejected in `MediaProcessor.check_count`, so the other
    methods are not called.

    whole: whether the tokens of an image attend to each other in both directions. whole_prompt: whether those of a
    prompt with an image do. crossed: the number of embeddings
    that the model reads by cross-attention; then a prompt has one item without tokens. sample_rate: of audio.
    most_embeds: of an item. adjustable: the settings that a request may change, such as "size.longest_edge", and their
    largest values, or None for a switch. None of them changes the encoder's expected input, or makes items larger than
    the checkpoint and the options allow.
    """

    kinds: dict[str, Kind] = field(default_factory=dict)
    whole = False
    whole_prompt = False
    crossed = 0
    sample_rate = 0
    most_embeds = 1 << 40
    adjustable: Mapping[str, int | None] = MappingProxyType({})

    @abstractmethod
    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        """config: the checkpoint's config.json. settings: of its processor, with the user's changes. token: the text of
        a token id."""

    def image(self, image: Image.Image) -> Prepared:
        """image: in RGB. Raises MediaError if the model does not support it."""
        raise NotImplementedError

    def video(self, frames: Frames) -> Prepared:
        raise NotImplementedError

    def audio(self, samples: Array) -> Prepared:
        """samples: float32, `sample_rate` a second. Raises MediaError if the model does not support it."""
        raise NotImplementedError

    def check_count(self, count: int) -> None:
        """Raises MediaError for an item with too many embeddings, before they cost anything."""
        if count > self.most_embeds:
            raise MediaError(f"an item of {count} embeddings is more than encoder_cache_size ({self.most_embeds})")

    def framed(self, prompt: str) -> str | None:
        """Return a prompt with images as the model expects it, with all special tokens and a placeholder for each item.
        None if prompts stay as they are."""
        return None

    def rotary_positions(self, token_ids: list[int], placed: Sequence[Placed]) -> Array | None:
        """Return the rotary positions [axes, tokens], int32, if they differ from the tokens' positions."""
        return None
