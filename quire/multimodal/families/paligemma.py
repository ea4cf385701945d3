"""PaliGemma (arXiv:2407.07726) and PaliGemma 2: an image of a fixed size before a short text. All tokens of such a
prompt attend to each other in both directions."""

from collections.abc import Callable

import numpy as np
from PIL import Image

from quire.multimodal.families.base import Config, Family, Kind, Prepared
from quire.multimodal.preprocessing import BICUBIC, HALF, normalized


class Pictures(Family):
    whole = True
    whole_prompt = True

    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        token_id = config.get("image_token_index", config.get("image_token_id", 256_000))
        vision = config["vision_config"]
        side = vision.get("image_size", 224)
        self.mark = token(token_id)
        self.begin = token(config.get("bos_token_id") or 2)
        self.num_embeds = (side // vision.get("patch_size", 14)) ** 2
        self.settings = settings
        self.kinds = {"image": Kind(self.mark, token_id, most=1)}
        self.size = side, side

    def image(self, image: Image.Image) -> Prepared:
        image = image.resize(self.size, Image.Resampling(self.settings.get("resample", BICUBIC)))
        values = normalized(np.asarray(image), self.settings, HALF, HALF)
        return Prepared({"pixel_values": values}, self.mark * self.num_embeds, self.num_embeds)

    def framed(self, prompt: str) -> str:
        before, mark, after = prompt.rpartition(self.mark)
        return f"{before}{mark or self.mark}{self.begin}{after}\n"
