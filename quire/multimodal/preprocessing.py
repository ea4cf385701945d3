"""Resizes and normalizes images, with the same values as transformers' processors for Pillow and numpy."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Array = npt.NDArray[Any]
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
BILINEAR, BICUBIC = 2, 3  # of PIL.Image.Resampling, which checkpoints name by number


def read_settings(directory: Path) -> dict[str, Any]:
    """Return the checkpoint's image settings: preprocessor_config.json, or a part of processor_config.json. "videos"
    contains the video settings, if a checkpoint has them."""
    settings: dict[str, Any] = {}
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (file := directory / name).is_file():
            found = json.loads(file.read_text(encoding="utf-8"))
            settings |= {key: value for key, value in found.items() if not isinstance(value, dict) or key == "size"}
            settings |= found.get("image_processor") or found.get("feature_extractor") or {}
            settings |= {key: found[key] for key in ("crop_size", "max_image_size") if key in found}
            if "video_processor" in found:
                settings["videos"] = found["video_processor"]
    if (file := directory / "video_preprocessor_config.json").is_file():
        settings["videos"] = json.loads(file.read_text(encoding="utf-8"))
    return settings


def shortest_edge(image: Image.Image, length: int) -> tuple[int, int]:
    """Return (width, height) with the given shorter edge and the same aspect ratio."""
    short, long = sorted(image.size)
    other = int(length * long / short)
    return (length, other) if image.width <= image.height else (other, length)


def center_crop(pixels: Array, height: int, width: int) -> Array:
    """pixels: [height, width, 3]; smaller images get a black border."""
    h, w, _ = pixels.shape
    if h >= height and w >= width:
        top = (h - height) // 2
        left = (w - width) // 2
        return pixels[top : top + height, left : left + width]
    padded = np.zeros((max(height, h), max(width, w), 3), pixels.dtype)
    top = -(-(padded.shape[0] - h) // 2)
    left = -(-(padded.shape[1] - w) // 2)
    padded[top : top + h, left : left + w] = pixels
    top = (h - height) // 2 + top
    left = (w - width) // 2 + left
    return padded[max(0, top) : max(0, top) + height, max(0, left) : max(0, left) + width]


def normalized(pixels: Array, settings: Mapping[str, Any], mean: Sequence[float], std: Sequence[float]) -> Array:
    """uint8 [height, width, 3] -> float32 [3, height, width]. mean, std: defaults for missing settings."""
    x = pixels.transpose(2, 0, 1)
    if settings.get("do_rescale", True):
        x = (x.astype(np.float64) * settings.get("rescale_factor", 1 / 255)).astype(np.float32)
    x = x.astype(np.float32)
    if settings.get("do_normalize", True):
        shift, scale = (
            np.array(settings.get(name) or default, np.float32)[:, None, None]
            for name, default in (("image_mean", mean), ("image_std", std))
        )
        x = (x - shift) / scale
    return np.ascontiguousarray(x)
