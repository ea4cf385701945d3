"""Decodes untrusted audio files in bounded memory and time, and converts them to a model's sample rate."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np

from quire.multimodal.containers import NAMES, container_of, open_sound
from quire.multimodal.pictures import MediaError
from quire.multimodal.preprocessing import Array
from quire.platform.extras import install_command

MOST_BYTES = 25 * 2**20  # of a file, as with OpenAI
MOST_SECONDS = 3600  # of audio: 230 MB at the rate of most models
MOST_CHANNELS = 8
RATES = range(1_000, 384_001)
DECODING_SECONDS = 60  # seconds for decoding a file
BLOCK = 1 << 18  # values decoded at a time

FORMATS = f"WAV, FLAC, MP3, Ogg, {NAMES}"


def decode_sound(data: bytes, sample_rate: int) -> Array:
    """Decode a file: [samples], float32, with its channels mixed. Raises MediaError. The declared length is checked
    before decoding, and the decoded samples are counted, since the declaration may be wrong.
    """
    try:
        import soundfile
    except ImportError as error:
        raise MediaError(f"sounds need more packages: {install_command('audio')}") from error
    if len(data) > MOST_BYTES:
        raise MediaError(f"the file has {len(data)} bytes; at most {MOST_BYTES} are allowed")
    began = time.monotonic()
    try:
        with open_sound(data) if container_of(data) else _open(data) as (rate, channels, blocks):
            _check(rate, channels, 0)
            resampler = _Resampler(rate, sample_rate)
            pieces = list[Array]()
            count = 0
            for block in blocks:
                count += len(block)
                _check(rate, channels, count)
                if time.monotonic() - began > DECODING_SECONDS:
                    raise MediaError(f"the file took more than {DECODING_SECONDS} s to decode")
                pieces.append(resampler(block))
            pieces.append(resampler(np.zeros(0, np.float32), last=True))
    except soundfile.SoundFileError as error:
        raise MediaError(f"the data is no sound in a known format ({FORMATS}), or it is damaged") from error
    return _checked(np.concatenate(pieces))


def sound(value: Any, sample_rate: int) -> Array:
    """Return audio passed by a program: an array of samples at the model's rate, or (array, rate). The array is
    [samples], or [channels, samples]. Raises MediaError."""
    given, rate = value if isinstance(value, tuple | list) and len(value) == 2 else (value, sample_rate)
    try:
        samples = np.asarray(given)
    except (ValueError, TypeError) as error:
        raise MediaError("a sound must be an array of samples, or (array, rate)") from error
    if samples.ndim == 2 and samples.shape[0] <= MOST_CHANNELS:
        samples = samples.mean(0)
    if samples.dtype.kind != "f" or samples.ndim != 1:
        raise MediaError(f"a sound must be an array of floats [samples], got {samples.dtype} {list(samples.shape)}")
    if isinstance(rate, bool) or not isinstance(rate, int | float | np.number):
        raise MediaError(f"the sample rate of a sound must be a number, got {type(rate).__name__}")
    _check(float(rate), 1, len(samples))
    return _checked(_Resampler(float(rate), sample_rate)(samples.astype(np.float32), last=True))


class _Resampler:
    """Convert from one sample rate to another, block by block."""

    def __init__(self, source: float, target: float) -> None:
        """Raises MediaError if the required package is missing."""
        self._stream: Any = None
        if source != target:
            try:
                import soxr
            except ImportError as error:
                message = f"a sound of {source:g} Hz must be resampled to {target:g}: {install_command('audio')}"
                raise MediaError(message) from error
            self._stream = soxr.ResampleStream(source, target, 1, dtype="float32")

    def __call__(self, samples: Array, last: bool = False) -> Array:
        if self._stream is None:
            return samples
        resampled: Array = self._stream.resample_chunk(np.ascontiguousarray(samples), last=last)
        return resampled


@contextmanager
def _open(data: bytes) -> Iterator[tuple[int, int, Iterator[Array]]]:
    """Like `open_sound`, for the formats of libsndfile."""
    import soundfile

    with soundfile.SoundFile(BytesIO(data)) as file:
        _check(file.samplerate, file.channels, file.frames)
        yield file.samplerate, file.channels, _blocks(file)


def _blocks(file: Any) -> Iterator[Array]:
    while len(block := file.read(BLOCK // file.channels, dtype="float32", always_2d=True)):
        yield block.mean(1)


def _check(rate: float, channels: int, samples: int) -> None:
    if not RATES.start <= rate < RATES.stop:
        raise MediaError(f"the sound has {rate:g} samples a second; {RATES.start} to {RATES.stop - 1} are allowed")
    if channels > MOST_CHANNELS:
        raise MediaError(f"the sound has {channels} channels; at most {MOST_CHANNELS} are allowed")
    if samples > MOST_SECONDS * rate:
        raise MediaError(f"the sound takes {samples / rate:.0f} s; at most {MOST_SECONDS} are allowed")


def _checked(samples: Array) -> Array:
    if not len(samples):
        raise MediaError("the sound has no samples")
    if not np.isfinite(samples).all():
        raise MediaError("the sound has samples that are not finite")
    return samples
