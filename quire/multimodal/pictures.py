"""Decodes untrusted images in bounded memory: the declared size is checked before the pixels are decoded."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from quire.config.multimodal import MOST_FRAMES, MOST_GIVEN_FRAMES

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MOST_PIXELS = 64_000_000  # of one image: 256 MB while it is decoded
WHITE = (255, 255, 255)
MOST_VIDEO_PIXELS = 2 * MOST_PIXELS  # of the selected frames

# Pillow's own limit only warns up to twice its value. Ours is checked first.
Image.MAX_IMAGE_PIXELS = 2 * MOST_PIXELS


class MediaError(ValueError):
    """An image or another item cannot be used. The message explains why, without quoting its content."""


def decode(data: bytes, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """Return the image in a file, upright and in RGB; for an animation, the first frame. background: see to_rgb. Raises
    MediaError."""
    image = _open(data)
    return to_rgb(_loaded(image), background)


def decode_frames(data: bytes, most: int = MOST_FRAMES, fps: float = 0.0) -> tuple[list[Image.Image], float]:
    """Return at most `most` evenly spaced RGB frames of an animated image (GIF, WebP, PNG), and their number per
    second. fps: the maximum number of frames per second; 0 or less for no limit. Raises MediaError."""
    image = _open(data)
    count = int(getattr(image, "n_frames", 1))
    if count * image.width * image.height > 16 * MOST_PIXELS:
        raise MediaError(f"the video has {count} frames of {image.width} x {image.height} pixels, which are too many")
    most = min(most, _most_of_seconds(image, count, fps)) if fps > 0 else most
    check_frames(min(count, most), image.width, image.height)
    chosen = np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()
    frames = []
    milliseconds = 0.0
    for index in chosen:
        try:
            image.seek(index)
        except (OSError, EOFError, ValueError, SyntaxError) as error:
            raise MediaError("the video is damaged") from error
        frames.append(_loaded(image).convert("RGB"))
        milliseconds += float(image.info.get("duration", 0))
    shown = milliseconds * count / len(frames) / 1000  # seconds, as if all frames were shown as long as the chosen ones
    return frames, len(frames) / shown if shown else 1.0


def _most_of_seconds(image: Image.Image, count: int, fps: float) -> int:
    """Return the number of frames at `fps` frames per second, at least 1. Each frame's duration is in its own part of
    the file, so the first frame's is used for all."""
    milliseconds = float(image.info.get("duration", 0)) * count
    return max(1, round(milliseconds / 1000 * fps)) if milliseconds else count


def decode_single_frames(files: Sequence[bytes]) -> list[Image.Image]:
    """Return the frames of a video that is given as image files. Raises MediaError."""
    frames = list[Image.Image]()
    for file in files:
        image = _open(file)
        check_frames(len(files), image.width, image.height)
        frames.append(to_rgb(_loaded(image)))
    return frames


def check_frames(count: int, width: int, height: int) -> None:
    """width, height: of the largest frame of a video, in pixels. Raises MediaError."""
    if not 0 < count <= MOST_GIVEN_FRAMES:
        raise MediaError(f"a video has 1 to {MOST_GIVEN_FRAMES} frames, got {count}")
    if count * width * height > MOST_VIDEO_PIXELS:
        size = f"{count} frames of {width} x {height} pixels"
        raise MediaError(f"the video has {size}; at most {MOST_VIDEO_PIXELS} pixels are allowed in all of them")


def _open(data: bytes) -> Image.Image:
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise MediaError(f"the image has too many pixels; at most {MOST_PIXELS} are allowed") from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, TypeError) as error:
        raise MediaError(f"the data is no image in a known format ({', '.join(FORMATS)})") from error
    if image.width * image.height > MOST_PIXELS:
        raise MediaError(f"the image has {image.width} x {image.height} pixels; at most {MOST_PIXELS} are allowed")
    return image


def _loaded(image: Image.Image) -> Image.Image:
    try:
        image.load()
    except Exception as error:  # decoders of damaged files raise anything: OSError, ValueError, struct.error ...
        raise MediaError("the image is damaged or incomplete") from error
    return image


def to_rgb(image: Image.Image, background: tuple[int, int, int] = WHITE) -> Image.Image:
    """Return the image rotated according to its EXIF data, in RGB. background: replaces transparency."""
    image = ImageOps.exif_transpose(image)
    if image.mode == "RGB":
        return image
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        image = image.convert("RGBA")
        below = Image.new("RGBA", image.size, (*background, 255))
        return Image.alpha_composite(below, image).convert("RGB")
    return image.convert("RGB")


def picture(value: Any) -> Image.Image:
    """Return an image passed by a program: a PIL image, or a uint8 array [height, width, 3]. Raises MediaError."""
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3 or not value.size:
            raise MediaError(f"an image must be an array of uint8 [height, width, 3], got {value.dtype} {value.shape}")
        value = Image.fromarray(value)
    if not isinstance(value, Image.Image):
        raise MediaError(f"an image must be a PIL.Image or a numpy array, got {type(value).__name__}")
    if value.width * value.height > MOST_PIXELS or not value.width or not value.height:
        raise MediaError(f"the image has {value.width} x {value.height} pixels; 1 to {MOST_PIXELS} are allowed")
    return to_rgb(_loaded(value))
