"""Empty inputs of an encoder. On a GPU, they are encoded at start to measure the encoder's memory and to compile its
kernels."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from quire.config.multimodal import MultiModalConfig
from quire.messages.media import Buffer, EncoderLimits, MediaItem, MediaPlace
from quire.multimodal.families.base import Family, Frames, Prepared
from quire.multimodal.processor import buffers, load_family, settings_of
from quire.multimodal.spec import MediaSpec

SIDES = (4096, 2048, 1024, 512, 256, 64)  # of images; processors downscale those that are too large
FRAMES = (32, 8, 2)
SECONDS = (30, 5, 1)


def _images(family: Family) -> Iterator[Prepared]:
    return (family.image(Image.new("RGB", (side, side))) for side in SIDES)


def _videos(family: Family) -> Iterator[Prepared]:
    return (family.video(Frames([Image.new("RGB", (512, 512))] * count)) for count in FRAMES)


def _sounds(family: Family) -> Iterator[Prepared]:
    return (family.audio(np.zeros(count * family.sample_rate, np.float32)) for count in SECONDS)


_SAMPLES: dict[str, Callable[[Family], Iterator[Prepared]]] = {"image": _images, "video": _videos, "audio": _sounds}


def largest_items(
    spec: MediaSpec, directory: Path, options: MultiModalConfig, limits: EncoderLimits
) -> Iterator[MediaItem]:
    """Return the largest sample within the limits for each modality that the model accepts."""
    if spec.encoder is not None:  # of texts
        length = spec.encoder.max_positions
        ids = Buffer("int64", [length], bytes(8 * length))
        yield MediaItem(MediaPlace("text", 0, 1, [], crossed=length), "text", {"ids": ids})
        return
    family = load_family(spec, settings_of(spec, directory, options.mm_processor_kwargs), lambda token_id: "")
    for modality in family.kinds:
        if options.limit_mm_per_prompt.get(modality) != 0:
            yield from _largest(modality, family, limits)


def _largest(modality: str, family: Family, limits: EncoderLimits) -> Iterator[MediaItem]:
    for made in _SAMPLES[modality](family):
        crossed = family.crossed
        place = MediaPlace(modality, 0, made.num_embeds, [] if crossed else [(0, made.num_embeds)], crossed=crossed)
        try:
            limits.check([place])
        except ValueError:
            continue
        yield MediaItem(place, modality, buffers(made))
        return
