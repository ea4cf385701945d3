"""Computes the audio spectra that models read."""

import numpy as np

from quire.multimodal.preprocessing import Array

_PIECE = 3000  # frames whose energies are computed at once


def mel_filters(fft: int, bins: int, sample_rate: int) -> Array:
    """Return the mel filters [fft / 2 + 1, bins]: triangles of equal area over the frequencies of a Fourier transform,
    from 0 to half of the sample rate. Their corners are evenly spaced in mels as in Slaney's Auditory Toolbox (1998):
    linear below 1000 Hz, which is 15 mels, and logarithmic above, where 27 mels correspond to a factor of 6.4."""
    step = np.log(6.4) / 27
    most = 15 + np.log(sample_rate / 2 / 1000) / step
    mels = np.linspace(0, most, bins + 2)
    corners = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(step * (mels - 15)))
    return _triangles(corners, fft, sample_rate) * (2 / (corners[2:] - corners[:-2]))


def htk_filters(fft: int, bins: int, sample_rate: int) -> Array:
    """Return the mel filters [fft / 2 + 1, bins] of HTK: triangles of equal height, evenly spaced in mels as defined by
    O'Shaughnessy (1987)."""
    most = np.log10(1 + sample_rate / 2 / 700)
    return _triangles(700 * (10 ** np.linspace(0, most, bins + 2) - 1), fft, sample_rate)


def _triangles(corners: Array, fft: int, sample_rate: int) -> Array:
    """corners: frequencies [bins + 2] -> [frequencies, bins]"""
    slopes = corners[None] - np.linspace(0, sample_rate // 2, fft // 2 + 1)[:, None]  # [frequencies, bins + 2]
    widths = np.diff(corners)
    filters: Array = np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return filters


def log_mel(
    samples: Array, filters: Array, fft: int, hop: int, width: int | None = None, with_last: bool = False
) -> Array:
    """samples: float32, at most 1 -> [bins, len(samples) / hop], float32: logarithms of the energies in windows of
    `width` samples, `fft` by default, clamped to 8 powers of ten below the largest one, scaled to about 1 (Whisper,
    section 2.2). with_last: whether there is one more window, around the end."""
    width = width or fft
    window = np.pad(0.5 - 0.5 * np.cos(2 * np.pi * np.arange(width) / width), (fft - width) // 2)
    padded = np.pad(samples.astype(np.float64), fft // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, fft)[::hop][: len(samples) // hop + with_last]
    pieces = [frames[first : first + _PIECE] for first in range(0, len(frames), _PIECE)]
    energies = np.concatenate([np.abs(np.fft.rfft(piece * window)) ** 2 @ filters for piece in pieces])
    levels: Array = np.log10(np.maximum(energies.T, 1e-10))
    scaled: Array = (np.maximum(levels, levels.max() - 8) + 4) / 4
    return scaled.astype(np.float32)
