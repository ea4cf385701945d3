"""Voxtral (arXiv:2507.13264): sounds in windows of 30 s, with an embedding for each 80 ms."""

from collections.abc import Callable

import numpy as np

from quire.multimodal.families.base import Config, Kind, Prepared
from quire.multimodal.families.whisper import Spectra
from quire.multimodal.mel import log_mel
from quire.multimodal.preprocessing import Array


class Sounds(Spectra):
    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        audio = config["audio_config"]
        super().__init__(audio, settings)
        token_id = config.get("audio_token_id") or 24
        self.text = token(token_id)
        self.kinds = {"audio": Kind(self.text, token_id)}
        stacked = audio["intermediate_size"] // audio["hidden_size"]  # results of the encoder in an embedding
        self.window_embeds = self.positions // stacked

    def audio(self, samples: Array) -> Prepared:
        windows = max(1, -(-len(samples) // self.most_samples))
        count = windows * self.window_embeds
        self.check_count(count)
        whole = np.zeros(windows * self.most_samples, np.float32)
        whole[: len(samples)] = samples
        mel = log_mel(whole, self.filters, self.fft, self.hop)  # [bins, frames]
        tensors = {
            "input_features": np.ascontiguousarray(mel.reshape(len(mel), windows, -1).transpose(1, 0, 2)),
            "input_ids": np.full(count, self.kinds["audio"].token_id, np.int64),
        }
        return Prepared(tensors, self.text * count, count)
