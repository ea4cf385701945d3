"""Pictures and other media in a prompt: the places and the inputs of their embeddings."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec


class Buffer(msgspec.Struct, array_like=True, frozen=True):
    """An array as bytes, in C order. dtype: its name in numpy, or "bfloat16"."""

    dtype: str
    shape: list[int]
    data: bytes


class MediaPlace(msgspec.Struct, array_like=True, frozen=True):
    """The prompt tokens that represent one item: `length` tokens from `start` on.

    key: hash of the item's content. Equal keys have equal embeddings. spans: (first, count) of tokens that are replaced
    by embeddings, relative to `start`; the others are text, such as the ends of rows. whole: all these tokens attend to
    each other in both directions, so one step computes them. crossed: how many embeddings the model reads by
    cross-attention instead.
    """

    key: str
    start: int
    length: int
    spans: list[tuple[int, int]]
    whole: bool = False
    crossed: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_embeds(self) -> int:
        return self.crossed + sum(count for _, count in self.spans)


class MediaItem(msgspec.Struct, array_like=True, frozen=True):
    """One picture, video or other item. modality: "image", "video", or "embeds" for embeddings from the request itself.
    tensors: the inputs of the model's encoder, by name."""

    place: MediaPlace
    modality: str
    tensors: dict[str, Buffer]

    def of_adapter(self, key: str) -> "MediaItem":
        """Return the item for a request with an adapter. key: the adapter's key. If the model uses cross-attention, the
        encoder has adapters, too, so results are not shared with requests for other adapters."""
        if not self.place.crossed:
            return self
        place = msgspec.structs.replace(self.place, key=f"{self.place.key} {key}")
        return msgspec.structs.replace(self, place=place)


@dataclass(frozen=True)
class EncoderLimits:
    """Limits of encoders, as numbers of embeddings. By default there are no media.

    budget: per step. exact: whether an item above the budget is rejected; otherwise it is encoded in a step that
    encodes nothing else. capacity: of the cache. longest_chunk: the maximum number of tokens of one request in a step.
    """

    budget: int = 0
    capacity: int = 0
    longest_chunk: int = 0
    exact: bool = False

    def check(self, places: Iterable[MediaPlace]) -> None:
        """Raises ValueError for an item that can never be encoded."""
        for place in places:
            size = place.num_embeds
            if size > self.capacity:
                raise ValueError(f"an item of {size} embeddings is more than encoder_cache_size ({self.capacity})")
            if self.exact and size > self.budget:
                message = f"an item of {size} embeddings is more than max_num_encoder_input_tokens ({self.budget})"
                raise ValueError(message)
            if place.whole and place.length > self.longest_chunk:
                raise ValueError(
                    f"an item of {place.length} tokens must be computed in one step, which has at most "
                    f"{self.longest_chunk}; raise max_num_batched_tokens"
                )
