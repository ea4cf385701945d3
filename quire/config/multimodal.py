"""The options of images and other media."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.declaration import ConfigError, at_least, option
from quire.messages.media import EncoderLimits

MODALITIES = ("image", "video", "audio")
CACHE_SIZE = 16_384  # embeddings
MOST_FRAMES = 32  # selected from a video file, unless media_io_kwargs sets another number
MOST_GIVEN_FRAMES = 8 * MOST_FRAMES  # of a video in any form
_SIZES = {"image": ("width", "height"), "video": ("num_frames", "width", "height"), "audio": ("length",)}


@dataclass(frozen=True)
class MediaIO:
    """How files of media are decoded: the fields of media_io_kwargs. num_frames: the maximum number of evenly spaced
    frames of a video. fps: the number of frames per second of video, up to num_frames in total; 0 for no such limit.
    background: the colour that replaces transparency."""

    num_frames: int = MOST_FRAMES
    fps: float = 0.0
    background: tuple[int, int, int] = (255, 255, 255)


@dataclass(frozen=True)
class MultiModalConfig:
    """Pictures and other media."""

    limit_mm_per_prompt: dict[str, Any] = option({}, json=True)
    language_model_only: bool = False
    media_io_kwargs: dict[str, Any] = option({}, json=True)
    mm_processor_kwargs: dict[str, Any] = option({}, json=True)
    mm_processor_cache_gb: float = 0.125
    allowed_local_media_path: str | None = None
    allowed_media_domains: list[str] = option([])
    max_num_encoder_input_tokens: int | None = option(None, size=True)
    encoder_cache_size: int | None = option(None, size=True)
    enable_prompt_embeds: bool = False

    def __post_init__(self) -> None:
        at_least(self, 1, "max_num_encoder_input_tokens", "encoder_cache_size")
        for name, limit in self.limit_mm_per_prompt.items():
            if name not in MODALITIES or not _is_limit(name, limit):
                example = '{"image": 2, "video": {"count": 1}}'
                raise ConfigError(
                    f"limit_mm_per_prompt must give numbers for {', '.join(MODALITIES)}, such as "
                    f"{example}, got {self.limit_mm_per_prompt!r}"
                )
        if not 0 <= self.mm_processor_cache_gb < 2**20:
            raise ConfigError(f"mm_processor_cache_gb is a number of GiB, got {self.mm_processor_cache_gb!r}")
        _ = self.media_io  # raises ConfigError

    def most_items(self, modality: str, default: int) -> int:
        """Return how many items of a modality a prompt may have. default: if no option sets it."""
        if self.language_model_only:
            return 0
        limit = self.limit_mm_per_prompt.get(modality, default)
        return int(limit.get("count", default) if isinstance(limit, Mapping) else limit)

    @property
    def media_io(self) -> MediaIO:
        """Raises ConfigError."""
        found = dict[str, Any]()
        for modality, settings in self.media_io_kwargs.items():
            known = _MEDIA_IO.get(modality)
            if known is None or not isinstance(settings, Mapping):
                raise ConfigError(
                    f"media_io_kwargs must have objects for {', '.join(_MEDIA_IO)}, got {modality!r}: {settings!r}"
                )
            for name, value in settings.items():
                if name not in known:
                    names = ", ".join(known) or "no field"
                    raise ConfigError(f"media_io_kwargs: {modality} has no field {name!r}; it has {names}")
                target, is_right, accepted = known[name]
                if not is_right(value):
                    raise ConfigError(f"media_io_kwargs: {modality}.{name} must be {accepted}, got {value!r}")
                if target == "num_frames":
                    value = MOST_GIVEN_FRAMES if value == -1 else value
                if target is not None:
                    found[target] = tuple(value) if isinstance(value, list | tuple) else value
        return MediaIO(**found)

    def limits(self, step_tokens: int, longest_chunk: int) -> EncoderLimits:
        """step_tokens: the maximum number of tokens per step. longest_chunk: the maximum for one request."""
        budget = self.max_num_encoder_input_tokens or step_tokens
        capacity = self.encoder_cache_size or max(CACHE_SIZE, budget)
        return EncoderLimits(budget, capacity, longest_chunk, exact=self.max_num_encoder_input_tokens is not None)


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_limit(modality: str, limit: Any) -> bool:
    """Whether it is a number, or vLLM's object with a count. Sizes in the object have no effect: memory is measured at
    start with the largest item that the other options allow."""
    if isinstance(limit, Mapping):
        sizes = {name: value for name, value in limit.items() if name != "count"}
        known = sizes.keys() <= set(_SIZES[modality])
        return known and _is_count(limit.get("count", 0)) and all(v is None or _is_count(v, 1) for v in sizes.values())
    return _is_count(limit)


def _is_frames(value: Any) -> bool:
    return value == -1 or (_is_count(value, 1) and value <= MOST_GIVEN_FRAMES)


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and (value == -1 or 0 < value < 1e6)


def _is_colour(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(_is_count(v) and v <= 255 for v in value)


# By modality and field: the field of MediaIO, or None; a check of a value; a description of valid values.
_Field = tuple[str | None, Callable[[Any], bool], str]
_MEDIA_IO: dict[str, dict[str, _Field]] = {
    "image": {
        "rgba_background_color": ("background", _is_colour, "three numbers from 0 to 255"),
        "image_mode": (None, lambda value: value == "RGB", '"RGB"'),
    },
    "video": {
        "num_frames": ("num_frames", _is_frames, f"a number from 1 to {MOST_GIVEN_FRAMES}, or -1 for all"),
        "fps": ("fps", _is_rate, "a number of frames a second, or -1 for no limit"),
    },
    "audio": {},
}
