"""Whisper (arXiv:2212.04356): the log-mel spectrum of 30 s of sound, which the decoder reads by cross-attention."""

from collections.abc import Callable

import numpy as np

from quire.text.tokenizer import Tokenizer
from quire_multimodal.families.base import Config, Family, Kind, Prepared
from quire_multimodal.mel import log_mel, mel_filters
from quire_multimodal.pictures import MediaError
from quire_multimodal.preprocessing import Array
from quire_multimodal.speech import Speech


class Sounds(Family):
    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        self.crossed = config.get("max_source_positions", 1500)
        self.kinds = {"audio": Kind("", -1)}
        self.sample_rate, self.hop = settings.get("sampling_rate", 16_000), settings.get("hop_length", 160)
        self.fft, self.most_samples = settings.get("n_fft", 400), 2 * self.crossed * self.hop
        self.filters = mel_filters(self.fft, config.get("num_mel_bins", 80), self.sample_rate)

    def speech(self, tokenizer: Tokenizer, settings: Config) -> Speech:
        """settings: of generation_config.json."""
        return Speech(tokenizer, settings, self.sample_rate, self.most_samples, self.crossed)

    def audio(self, samples: Array) -> Prepared:
        if len(samples) > self.most_samples:
            longest = self.most_samples / self.sample_rate
            raise MediaError(f"the sound is longer than {longest:g} s; give the model pieces of it")
        whole = np.zeros(self.most_samples, np.float32)
        whole[: len(samples)] = samples
        return Prepared({"mel": log_mel(whole, self.filters, self.fft, self.hop)}, "", self.crossed)
