"""Alpamayo 2 Super: pictures as for Qwen3-VL, with limits of pixels that are in the model's config."""

from collections.abc import Callable

from quire.multimodal.families import qwen_vl
from quire.multimodal.families.base import Config


class Pictures(qwen_vl.Pictures):
    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        super().__init__(config, {**settings, "size": None, **config["pixels"]}, token)
        del self.kinds["video"]
