"""LLaVA-1.5 (arXiv:2310.03744): an image of a fixed size, with one embedding per patch."""

from collections.abc import Callable

import numpy as np
from PIL import Image

from quire.multimodal.families.base import Config, Family, Kind, Prepared
from quire.multimodal.preprocessing import BICUBIC, CLIP_MEAN, CLIP_STD, center_crop, normalized, shortest_edge


class Pictures(Family):
    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        token_id = config.get("image_token_id", config.get("image_token_index", 32_000))
        self.text = token(token_id)
        vision = config["vision_config"]
        self.settings, self.kinds = settings, {"image": Kind(self.text, token_id)}
        side = vision.get("image_size", 336)
        patch = vision.get("patch_size", 14)
        has_class = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
        keeps_class = has_class and config.get("vision_feature_select_strategy", "default") != "default"
        self.side = side
        self.num_embeds = (side // patch) ** 2 + keeps_class

    def image(self, image: Image.Image) -> Prepared:
        settings = self.settings
        size = self.settings.get("size") or {"shortest_edge": self.side}
        edge = size if isinstance(size, int) else size.get("shortest_edge")
        target = (size["width"], size["height"]) if edge is None else shortest_edge(image, edge)
        resampling = Image.Resampling(settings.get("resample", BICUBIC))
        pixels = np.asarray(image.resize(target, resampling) if settings.get("do_resize", True) else image)
        if settings.get("do_center_crop", True):
            pixels = center_crop(pixels, self.side, self.side)
        values = normalized(pixels, settings, CLIP_MEAN, CLIP_STD)
        return Prepared({"pixel_values": values}, self.text * self.num_embeds, self.num_embeds)
