"""Chooses threads and the size of steps for a model, from what was measured of this machine.

The time of a step with n tokens is estimated as

    operations of n tokens / rate of products with n rows  +  layers x kernels of a layer x seconds of a call
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.checkpoints.formats.config import quantization_kind
from quire.models.parameters import parameters_of
from quire.models.spec import DecoderSpec
from quire.platform.machine_profile import MachineProfile

SIZES = (128, 256, 512, 1024, 2048)  # tokens of prompts in a step, among which one is chosen
USUAL = 512
WITHIN = 0.97  # of the best: what a choice with fewer threads or tokens must reach
_CALLS_PER_LAYER = 12  # products, norms, rotation, attention and activation
_ONE_BYTE = ("fp8", "float8", "int8")
_LEAST_BESIDE_STREAMS = 128  # tokens of prompts for which a step has room while all other requests generate


@dataclass(frozen=True)
class Work:
    """What a step of a model does. kind: of its weights, as in a profile. parameters: those that each token is
    multiplied with, without the output layer, and those of the output layer."""

    kind: str
    parameters: int
    output: int
    layers: int


def work_of(spec: DecoderSpec, config: Mapping[str, Any], quantization: str | None, directory: Path) -> Work:
    """config: the checkpoint's config.json. directory: of the checkpoint, or its GGUF file."""
    counted = parameters_of(spec)
    return Work(_kind(config, quantization, directory), counted.rest + counted.chosen, counted.output, spec.num_layers)


def _kind(config: Mapping[str, Any], quantization: str | None, directory: Path) -> str:
    """The kind of weights whose products are measured and that are most like these."""
    if quantization in ("int8", "int4"):
        return quantization
    if directory.is_file():  # GGUF, most often with codes of about four bits
        return "int4"
    if quantization_kind(config) is None:
        return "dense"
    settings = config.get("quantization_config") or config.get("compression_config") or {}
    return "int8" if any(name in str(settings).lower() for name in _ONE_BYTE) else "int4"


@dataclass(frozen=True)
class Estimate:
    """The times of a model's steps on this machine."""

    profile: MachineProfile
    work: Work

    @property
    def is_usable(self) -> bool:
        """Whether the figures are those of a quiet machine, and complete for this kind of weights."""
        rates = self.profile.rates.get(self.work.kind, {}).get(self.profile.threads, {})
        return (
            self.profile.is_quiet and {1, 128, 256, USUAL} <= set(rates) and self.profile.threads in self.profile.calls
        )

    @property
    def fastest(self) -> float:
        """Operations a second, with the best number of rows."""
        return max(self.profile.rates[self.work.kind][self.profile.threads].values())

    def seconds(self, tokens: int, threads: int | None = None) -> float:
        """The time of a step. threads: None for as many as were measured."""
        return float(self._seconds(np.array([tokens]), threads)[0])

    def _seconds(self, tokens: npt.NDArray[np.int64], threads: int | None = None) -> npt.NDArray[np.float64]:
        """The times of steps. Between two sizes that were measured, they are interpolated."""
        threads = threads or self.profile.threads
        sizes, rates = zip(*sorted(self.profile.rates[self.work.kind][threads].items()), strict=True)
        times = [2 * self.work.parameters * size / rate for size, rate in zip(sizes, rates, strict=True)]
        products: npt.NDArray[np.float64] = np.interp(tokens, sizes, times)
        return products + self._calls(threads)

    def _calls(self, threads: int) -> float:
        return _CALLS_PER_LAYER * self.work.layers * self.profile.calls[threads]

    def threads(self) -> int:
        """The fewest threads that reach WITHIN of the best speed, for one stream and for prompts.

        Where the two need different numbers, both shall lose as little as possible. Fewer than all must be clearly
        enough.
        """
        rates = self.profile.rates[self.work.kind]
        work = self.work
        counts = [n for n in sorted(rates) if {1, USUAL} <= set(rates[n]) and n in self.profile.calls]
        read = 2 * (work.parameters + work.output)
        decoding = {n: read / rates[n][1] + self._calls(n) for n in counts}
        prompts = {n: self.seconds(USUAL, n) for n in counts}
        fastest = min(decoding.values()), min(prompts.values())
        shares = {n: min(fastest[0] / decoding[n], fastest[1] / prompts[n]) for n in counts}
        enough = (WITHIN + self.profile.noise) * max(shares.values())
        return next((n for n in counts if shares[n] >= enough), counts[-1])

    def chunk(self) -> int:
        """The usual size, unless another one is faster by more than what is tolerated and than the noise; then the
        smallest of SIZES with which prompts reach WITHIN of the best speed.

        Longer steps need more memory, and streams wait longer for them. Shorter ones have costs that are not estimated.
        """
        measured = self.profile.rates[self.work.kind][self.profile.threads]
        each = {size: self.seconds(size) / size for size in SIZES if size in measured}
        most = min(each.values()) / WITHIN
        if each[USUAL] <= most * (1 + self.profile.noise):
            return USUAL
        return next(size for size in each if each[size] <= most)

    def tokens_within(self, seconds: float) -> int:
        """The most tokens of a step that takes no longer, up to the largest of SIZES; 0 if even one token does."""
        return int((self._seconds(np.arange(1, SIZES[-1] + 1)) <= seconds).sum())


def tokens_of_a_step(chunk: int, max_num_seqs: int) -> int:
    """The maximum number of tokens per step: the chunk, and more if many requests generate beside it."""
    return max(chunk, max_num_seqs + _LEAST_BESIDE_STREAMS)
