"""InternVL 3 (arXiv:2504.10479): an image is cut into a grid of tiles close to its aspect ratio, followed by a
downscaled version of the whole image. A video is a text with numbered frames of one tile each. In the original format,
the settings of images are in the model's config."""

from collections.abc import Callable

import numpy as np
from PIL import Image

from quire.multimodal.families.base import Config, Family, Frames, Kind, Prepared
from quire.multimodal.preprocessing import BICUBIC, CLIP_MEAN, CLIP_STD, normalized


class Pictures(Family):
    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        token_id = config.get("image_token_id", 151_667)
        vision = config["vision_config"]
        self.text = token(token_id)
        self.settings = settings
        self.kinds = {"image": Kind(self.text, token_id)}
        if not config.get("numbers_tiles"):
            self.kinds["video"] = Kind("<video>", token_id)
        side, patch = (first(vision.get(name, default)) for name, default in (("image_size", 448), ("patch_size", 14)))
        self.has_thumbnail = True
        if original := config.get("of_images"):
            self.settings = settings = {**original, **settings, "size": {"height": side}}
            self.has_thumbnail = original["use_thumbnail"]
        self.side = (settings.get("size") or {}).get("height", side)
        self.numbers_tiles = bool(config.get("numbers_tiles"))
        self.of_tile = int(self.side // patch * config.get("downsample_ratio", 0.5)) ** 2
        self.least, self.most = settings.get("min_patches", 1), settings.get("max_patches", 12)
        self.adjustable = {"min_patches": self.most, "max_patches": self.most, "crop_to_patches": None}

    def image(self, image: Image.Image) -> Prepared:
        settings = self.settings
        tiles = list[Image.Image]()
        side = self.side
        columns = 1
        rows = 1
        if settings.get("crop_to_patches", True):
            columns, rows = self._grid(*image.size)
            cut = self._resized(image, columns, rows)
            for row in range(rows):
                for column in range(columns):
                    box = (column * side, row * side, (column + 1) * side, (row + 1) * side)
                    tiles.append(cut.crop(box))
        if not tiles or (self.has_thumbnail and len(tiles) != 1):
            tiles.append(self._resized(image, 1, 1))
        embeds = self.text * self.of_tile
        if not self.numbers_tiles:
            return self._prepared(tiles, f"<img>{embeds * len(tiles)}</img>")
        names = [*(f"<tile_{number}>" for number in range(1, len(tiles))), "<tile_global_thumbnail>"]
        return self._prepared(tiles, f"<Image>{''.join(name + embeds for name in names)}</Image>")

    def video(self, frames: Frames) -> Prepared:
        tiles = [self._resized(image, 1, 1) for image in frames.images]
        embeds = self.text * self.of_tile
        text = "\n".join(f"Frame{number}: <img>{embeds}</img>" for number in range(1, len(tiles) + 1))
        return self._prepared(tiles, text)

    def _prepared(self, tiles: list[Image.Image], text: str) -> Prepared:
        values = np.stack([normalized(np.asarray(tile), self.settings, CLIP_MEAN, CLIP_STD) for tile in tiles])
        return Prepared({"pixel_values": values}, text, len(tiles) * self.of_tile)

    def _resized(self, image: Image.Image, columns: int, rows: int) -> Image.Image:
        resampling = Image.Resampling(self.settings.get("resample", BICUBIC))
        return image.resize((columns * self.side, rows * self.side), resampling)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows whose ratio is nearest to the image's aspect ratio. Of equally near ones, in the
        order of their numbers of tiles, the last one that is less than twice as large as the image is chosen."""
        edges = range(1, self.most + 1)
        grids = [(c, r) for c in edges for r in edges if self.least <= c * r <= self.most]
        best = (1, 1)
        nearest = float("inf")
        for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            distance = abs(width / height - columns / rows)
            fits = width * height > 0.5 * self.side**2 * columns * rows
            if distance < nearest or (distance == nearest and fits):
                best = (columns, rows)
                nearest = distance
        return best


def first(value: int | list[int]) -> int:
    """Return the edge of a size that is one number, or two equal ones."""
    return value if isinstance(value, int) else value[0]
