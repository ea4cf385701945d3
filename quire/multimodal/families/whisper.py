"""Whisper (arXiv:2212.04356): the log-mel spectrum of 30 s of sound, which the decoder reads by cross-attention."""

from collections.abc import Callable

import numpy as np

from quire.multimodal.families.base import Config, Family, Kind, Prepared
from quire.multimodal.mel import log_mel, mel_filters
from quire.multimodal.pictures import MediaError
from quire.multimodal.preprocessing import Array
from quire.multimodal.speech import Speech
from quire.text.tokenizer import Tokenizer


class Spectra(Family):
    """The base of models with Whisper's audio encoder."""

    def __init__(self, config: Config, settings: Config) -> None:
        """config: of the encoder."""
        self.positions = config.get("max_source_positions", 1500)
        self.sample_rate, self.hop = settings.get("sampling_rate", 16_000), settings.get("hop_length", 160)
        self.fft = settings.get("n_fft", 400)
        self.most_samples = 2 * self.positions * self.hop
        self.filters = mel_filters(self.fft, config.get("num_mel_bins", 80), self.sample_rate)

    def mel(self, samples: Array) -> Array:
        """Return the spectrum of audio padded with silence: [bins, frames]. Raises MediaError if the audio is too
        long."""
        if len(samples) > self.most_samples:
            longest = self.most_samples / self.sample_rate
            raise MediaError(f"the sound is longer than {longest:g} s; give the model pieces of it")
        whole = np.zeros(self.most_samples, np.float32)
        whole[: len(samples)] = samples
        return log_mel(whole, self.filters, self.fft, self.hop)


class Sounds(Spectra):
    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        super().__init__(config, settings)
        self.crossed, self.kinds = self.positions, {"audio": Kind("", -1)}

    def speech(self, tokenizer: Tokenizer, settings: Config) -> Speech:
        """settings: of generation_config.json."""
        return Speech(tokenizer, settings, self.sample_rate, self.most_samples, self.positions)

    def audio(self, samples: Array) -> Prepared:
        return Prepared({"mel": self.mel(samples)}, "", self.crossed)
