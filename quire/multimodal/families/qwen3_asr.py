"""Qwen3-ASR (arXiv:2601.21337): 13 embeddings for each second of sound."""

from collections.abc import Callable

import numpy as np

from quire.multimodal.families.base import Config, Family, Kind, Prepared
from quire.multimodal.mel import log_mel, mel_filters
from quire.multimodal.preprocessing import Array

FFT = 400
HOP = 160
LEAST_SAMPLES = 8000  # shorter sounds are padded with silence


def halved(frames: int) -> int:
    """Return how many results three convolutions with a stride of 2 have."""
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames


class Sounds(Family):
    sample_rate = 16_000

    def __init__(self, config: Config, settings: Config, token: Callable[[int], str]) -> None:
        audio = config["audio_config"]
        token_id = config.get("audio_token_id", 151_676)
        self.text = token(token_id)
        self.kinds = {"audio": Kind(self.text, token_id)}
        self.chunk = 2 * audio.get("n_window", 50)  # frames that are convolved together
        self.filters = mel_filters(FFT, audio.get("num_mel_bins", 128), self.sample_rate)

    def audio(self, samples: Array) -> Prepared:
        padded = np.pad(samples, (0, max(0, LEAST_SAMPLES - len(samples))))
        chunks, rest = divmod(len(padded) // HOP, self.chunk)
        count = chunks * halved(self.chunk) + halved(rest)
        self.check_count(count)
        return Prepared({"mel": log_mel(padded, self.filters, FFT, HOP)}, self.text * count, count)
