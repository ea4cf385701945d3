"""Pixtral (arXiv:2410.07073) and Mistral Small 3.1: images of any size, with a token at the end of each row."""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image

from quire.multimodal.families.base import Config, Family, Kind, Prepared
from quire.multimodal.preprocessing import BICUBIC, CLIP_MEAN, CLIP_STD, normalized


class Pictures(Family):
    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        token_id = config.get("image_token_id", config.get("image_token_index", 10))
        self.text = token(token_id)
        self.settings = settings
        self.kinds = {"image": Kind(self.text, token_id)}
        vision = config["vision_config"]
        self.unit = vision.get("patch_size", 16) * config.get("spatial_merge_size", 1)
        self.longest = (settings.get("size") or {}).get("longest_edge", vision.get("image_size", 1024))
        self.adjustable = {"size.longest_edge": self.longest}

    def image(self, image: Image.Image) -> Prepared:
        width, height = image.size
        shrink = max(width / self.longest, height / self.longest)
        if shrink > 1:
            width = max(math.floor(width / shrink), 1)
            height = max(math.floor(height / shrink), 1)
        columns = -(-width // self.unit)
        rows = -(-height // self.unit)
        resampling = Image.Resampling(self.settings.get("resample", BICUBIC))
        image = image.resize((columns * self.unit, rows * self.unit), resampling)
        values = normalized(np.asarray(image), self.settings, CLIP_MEAN, CLIP_STD)
        lines = [self.text * columns] * rows
        return Prepared({"pixel_values": values}, "[IMG_BREAK]".join(lines) + "[IMG_END]", rows * columns)
