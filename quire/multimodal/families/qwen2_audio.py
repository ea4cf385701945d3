"""Qwen2-Audio (arXiv:2407.10759): an embedding for each 40 ms of up to 30 s of sound."""

from collections.abc import Callable

import numpy as np

from quire.multimodal.families.base import Config, Kind, Prepared
from quire.multimodal.families.whisper import Spectra
from quire.multimodal.pictures import MediaError
from quire.multimodal.preprocessing import Array


class Sounds(Spectra):
    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        super().__init__(config["audio_config"], settings)
        token_id = config.get("audio_token_id", config.get("audio_token_index", 151_646))
        self.text = token(token_id)
        self.kinds = {"audio": Kind(self.text, token_id)}

    def audio(self, samples: Array) -> Prepared:
        frames = -(-len(samples) // self.hop)
        count = ((frames - 1) // 2 + 1) // 2  # the encoder halves them twice
        if not count:
            raise MediaError("the sound is shorter than 40 ms")
        tensors = {"mel": self.mel(samples), "frames": np.array([frames], np.int64)}
        return Prepared(tensors, self.text * count, count)
