"""Gemma 3 (arXiv:2503.19786): images of a fixed size, whose tokens attend to each other in both directions."""

from collections.abc import Callable

import numpy as np
from PIL import Image

from quire.multimodal.families.base import Config, Family, Kind, Prepared
from quire.multimodal.pictures import MediaError
from quire.multimodal.preprocessing import BILINEAR, HALF, normalized


class Pictures(Family):
    whole = True

    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        token_id = config.get("image_token_index", config.get("image_token_id", 262_144))
        begin = token(config.get("boi_token_index", 255_999))
        end = token(config.get("eoi_token_index", 256_000))
        self.num_embeds = config.get("mm_tokens_per_image", 256)
        self.settings = settings
        self.kinds = {"image": Kind(begin, token_id)}
        self.text = f"\n\n{begin}{token(token_id) * self.num_embeds}{end}\n\n"
        side = config["vision_config"].get("image_size", 896)
        size = settings.get("size") or {}
        self.size = size.get("width", side), size.get("height", side)
        if self.size != (side, side):
            raise ValueError(f"the encoder sees pictures of {side} x {side} pixels, not {self.size}")

    def image(self, image: Image.Image) -> Prepared:
        if self.settings.get("do_pan_and_scan"):
            raise MediaError("mm_processor_kwargs: do_pan_and_scan is not supported by Quire yet")
        image = image.resize(self.size, Image.Resampling(self.settings.get("resample", BILINEAR)))
        values = normalized(np.asarray(image), self.settings, HALF, HALF)
        return Prepared({"pixel_values": values}, self.text, self.num_embeds)
