"""Granite Speech (arXiv:2505.08699): its encoder reads pairs of frames of a spectrum, and makes a few embeddings of a
window of these."""

from collections.abc import Callable

import numpy as np

from quire.multimodal.families.base import Config, Family, Kind, Prepared
from quire.multimodal.mel import htk_filters, log_mel
from quire.multimodal.pictures import MediaError
from quire.multimodal.preprocessing import Array

FFT = 512
WIDTH = 400
HOP = 160


class Sounds(Family):
    sample_rate = 16_000

    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        token_id = config.get("audio_token_index", 49_155)
        self.text = token(token_id)
        self.kinds = {"audio": Kind(self.text, token_id)}
        self.window = config.get("window_size", 15)
        self.window_embeds = self.window // config.get("downsample_rate", 5)
        self.filters = htk_filters(FFT, config["encoder_config"].get("input_dim", 160) // 2, self.sample_rate)

    def audio(self, samples: Array) -> Prepared:
        if len(samples) < FFT:
            raise MediaError(f"the sound is shorter than {1000 * FFT // self.sample_rate} ms")
        inputs = (len(samples) // HOP + 1) // 2
        count = -(-inputs // self.window) * self.window_embeds
        self.check_count(count)
        mel = log_mel(samples, self.filters, FFT, HOP, WIDTH, with_last=True)  # [bins, frames]
        features = mel[:, : 2 * inputs].T.reshape(1, inputs, -1)
        tensors = {
            "input_features": np.ascontiguousarray(features),
            "input_features_mask": np.ones((1, count), bool),
            "input_ids": np.full(count, self.kinds["audio"].token_id, np.int64),
        }
        return Prepared(tensors, self.text * count, count)
