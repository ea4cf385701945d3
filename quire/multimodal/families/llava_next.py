"""LLaVA-NeXT (LLaVA-1.6) and LLaVA-OneVision (arXiv:2408.03326): a downscaled version of the whole image, followed by
tiles of a larger version. The embeddings of the tiles' border are dropped, and each row ends with a special
embedding."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from quire.multimodal.families.base import Config, Family, Frames, Kind, Prepared
from quire.multimodal.pictures import MediaError
from quire.multimodal.preprocessing import BICUBIC, CLIP_MEAN, CLIP_STD, Array, normalized

SIZES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]  # (height, width)


class Pictures(Family):
    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        image_id = config.get("image_token_id", config.get("image_token_index", 32_000))
        self.settings, self.kinds = settings, {"image": Kind(token(image_id), image_id)}
        if config.get("model_type") == "llava_onevision":
            video_id = config.get("video_token_id", config.get("video_token_index", 151_647))
            self.kinds["video"] = Kind(token(video_id), video_id)
        self.side, self.per_edge = tile_sizes(config)
        self.sizes = config.get("image_grid_pinpoints") or SIZES
        self.most_tiles = most_tiles(config)

    def image(self, image: Image.Image) -> Prepared:
        size = height, width = best_size(image.height, image.width, self.sizes)
        tiles = [self._resized(image, self.side, self.side)]
        canvas = self._fitted(image, width, height)
        for top in range(0, height, self.side):
            for left in range(0, width, self.side):
                tiles.append(canvas.crop((left, top, left + self.side, top + self.side)))
        grid = size[0] // self.side * self.per_edge, size[1] // self.side * self.per_edge
        (rows, columns), _ = kept(*grid, image.height, image.width, self.per_edge, self.most_tiles)
        count = self.per_edge**2 + rows * (columns + 1)
        shape = np.array([image.height, image.width], np.int64)
        tensors = {"pixel_values": self._values(tiles), "size": shape}
        return Prepared(tensors, self.kinds["image"].placeholder * count, count)

    def video(self, frames: Frames) -> Prepared:
        tiles = [self._resized(frame, self.side, self.side) for frame in frames.images]
        count = len(tiles) * math.ceil(self.per_edge / 2) ** 2 + 1
        return Prepared({"pixel_values": self._values(tiles)}, self.kinds["video"].placeholder * count, count)

    def _values(self, tiles: Sequence[Image.Image]) -> Array:
        return np.stack([normalized(np.asarray(tile), self.settings, CLIP_MEAN, CLIP_STD) for tile in tiles])

    def _resized(self, image: Image.Image, width: int, height: int) -> Image.Image:
        return image.resize((width, height), Image.Resampling(self.settings.get("resample", BICUBIC)))

    def _fitted(self, image: Image.Image, width: int, height: int) -> Image.Image:
        """Return the image scaled to fit without changing its aspect ratio, centred on black."""
        wide = width / image.width
        high = height / image.height
        if wide < high:
            inner = width, min(math.ceil(image.height * wide), height)
        else:
            inner = min(math.ceil(image.width * high), width), height
        canvas = Image.new("RGB", (width, height))
        canvas.paste(self._resized(image, *inner), ((width - inner[0]) // 2, (height - inner[1]) // 2))
        return canvas


def tile_sizes(config: Config) -> tuple[int, int]:
    """Return the edge of a tile in pixels, and in embeddings. Raises ValueError if its embeddings are not a square."""
    vision = config["vision_config"]
    is_clip = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
    if is_clip != (config.get("vision_feature_select_strategy", "default") == "default"):
        raise ValueError("vision_feature_select_strategy must be default with CLIP, and full without")
    side = vision.get("image_size", 336)
    return side, side // vision.get("patch_size", 14)


def most_tiles(config: Config) -> int | None:
    """Return the maximum of an image's embeddings, in tiles; LLaVA-OneVision reduces them by interpolation."""
    default = "anyres_max_9" if config.get("model_type") == "llava_onevision" else ""
    ratio = str(config.get("vision_aspect_ratio", default))
    return int(ratio.removeprefix("anyres_max_")) if ratio.startswith("anyres_max_") else None


def best_size(height: int, width: int, sizes: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the size (height, width) that preserves the most pixels of the image; of equal ones, the one with the
    smallest border. Raises MediaError for images so narrow that nothing would be left of them."""
    ranked = list[tuple[int, int, int]]()
    for high, wide in sizes:
        scale = min(wide / width, high / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        ranked.append((-used, high * wide - used, len(ranked)))
    used, _, index = min(ranked)
    if not used:
        raise MediaError("the picture is too long and narrow for this model")
    return sizes[index][0], sizes[index][1]


def kept(
    rows: int, columns: int, height: int, width: int, per_edge: int, most: int | None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the (rows, columns) of the tiles' embeddings for an image [height, width], and how many of them are
    dropped at each edge, before interpolation."""
    top = left = 0
    if width / height > columns / rows:
        top = (rows - int(round(height * (columns / width), 7))) // 2
    else:
        left = (columns - int(round(width * (rows / height), 7))) // 2
    rows = rows - 2 * top
    columns = columns - 2 * left
    if most is not None:
        ratio = math.sqrt(rows * columns / (most * per_edge**2))
        if ratio > 1.1:
            rows = int(rows // ratio)
            columns = int(columns // ratio)
    return (rows, columns), (top, left)
