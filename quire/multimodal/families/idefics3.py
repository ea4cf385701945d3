"""Idefics3 (arXiv:2408.12637) and SmolVLM (arXiv:2504.05299): an image is cut into tiles, followed by a downscaled
version of the whole image."""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image

from quire.multimodal.families.base import Config, Family, Kind, Prepared
from quire.multimodal.preprocessing import HALF, normalized

LANCZOS = 1  # of PIL.Image.Resampling
LONGEST = 4096  # pixels of an edge


class Pictures(Family):
    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        token_id = config.get("image_token_id", 128_257)
        vision = config["vision_config"]
        self.text = token(token_id)
        self.settings = settings
        self.kinds = {"image": Kind(self.text, token_id)}
        side = vision.get("image_size", 224)
        patch = vision.get("patch_size", 32)
        self.tile = (settings.get("max_image_size") or {}).get("longest_edge", side)
        self.longest = (settings.get("size") or {}).get("longest_edge", 4 * self.tile)
        self.of_tile = (self.tile // patch // config.get("scale_factor", 2)) ** 2
        self.adjustable = {"size.longest_edge": self.longest, "do_image_splitting": None}

    def image(self, image: Image.Image) -> Prepared:
        if self.settings.get("do_resize", True):
            image = self._resized(image, *self._fitted(*image.size))
        tiles = list[Image.Image]()
        rows = 0
        columns = 0
        if self.settings.get("do_image_splitting", True):
            image = self._resized(image, *self._in_tiles(*image.size))
            columns = image.width // self.tile
            rows = image.height // self.tile
            for top in range(0, image.height, self.tile):
                for left in range(0, image.width, self.tile):
                    tiles.append(image.crop((left, top, left + self.tile, top + self.tile)))
        if len(tiles) != 1:
            tiles.append(self._resized(image, self.tile, self.tile))
        else:
            rows = columns = 0
        values = np.stack([normalized(np.asarray(tile), self.settings, HALF, HALF) for tile in tiles])
        return Prepared({"pixel_values": values}, self._text(rows, columns), len(tiles) * self.of_tile)

    def _text(self, rows: int, columns: int) -> str:
        around = "<fake_token_around_image>"
        embeds = self.text * self.of_tile
        lines = [
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{embeds}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + ("\n" if rows else "") + f"{around}<global-img>{embeds}{around}"

    def _resized(self, image: Image.Image, width: int, height: int) -> Image.Image:
        return image.resize((width, height), Image.Resampling(self.settings.get("resample", LANCZOS)))

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return the size with the longest edge from the settings. The other edge is even."""
        ratio = width / height
        longest = self.longest
        if width >= height:
            width = longest
            height = int(longest / ratio)
            height += height % 2
        else:
            width = int(longest * ratio)
            height = longest
            width += width % 2
        width = max(width, 1)
        height = max(height, 1)
        ratio = width / height
        if width >= height and width > LONGEST:
            width = LONGEST
            height = int(LONGEST / ratio)
        elif height > LONGEST:
            width = int(LONGEST * ratio)
            height = LONGEST
        return max(width, 1), max(height, 1)

    def _in_tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return the next larger size that consists of whole tiles."""
        ratio = width / height
        tile = self.tile
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        return max(width, tile), max(height, tile)
