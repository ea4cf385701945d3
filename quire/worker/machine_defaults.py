"""Chooses the number of threads and the step size for a model from measurements of this machine.

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

SIZES = (128, 256, 512, 1024, 2048)  # the candidates for prompt tokens per step
USUAL = 512
WITHIN = 0.97  # fraction of the best speed that fewer threads or tokens must reach
_CALLS_PER_LAYER = 12  # products, norms, rotation, attention and activation
_ONE_BYTE = ("fp8", "float8", "int8")
_LEAST_BESIDE_STREAMS = 128  # room for prompt tokens in a step while all other requests generate


@dataclass(frozen=True)
class Work:
    """The work of a model's step. kind: of its weights, as in a profile. parameters: the number that each token is
    multiplied with, excluding the output layer, and the number in the output layer."""

    kind: str
    parameters: int
    output: int
    layers: int


def work_of(spec: DecoderSpec, config: Mapping[str, Any], quantization: str | None, directory: Path) -> Work:
    """config: the checkpoint's config.json. directory: of the checkpoint, or its GGUF file."""
    counted = parameters_of(spec)
    return Work(_kind(config, quantization, directory), counted.rest + counted.chosen, counted.output, spec.num_layers)


def _kind(config: Mapping[str, Any], quantization: str | None, directory: Path) -> str:
    """Return the measured kind of weights that is most similar to the model's."""
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
        """Whether the measurements were made on a quiet machine, and are complete for this kind of weights."""
        rates = self.profile.rates.get(self.work.kind, {}).get(self.profile.threads, {})
        return (
            self.profile.is_quiet and {1, 128, 256, USUAL} <= set(rates) and self.profile.threads in self.profile.calls
        )

    @property
    def fastest(self) -> float:
        """Return the operations per second with the best number of rows."""
        return max(self.profile.rates[self.work.kind][self.profile.threads].values())

    def seconds(self, tokens: int, threads: int | None = None) -> float:
        """Return the time of a step. threads: None for the measured number."""
        return float(self._seconds(np.array([tokens]), threads)[0])

    def _seconds(self, tokens: npt.NDArray[np.int64], threads: int | None = None) -> npt.NDArray[np.float64]:
        """Return the times of steps, interpolated between measured sizes."""
        threads = threads or self.profile.threads
        sizes, rates = zip(*sorted(self.profile.rates[self.work.kind][threads].items()), strict=True)
        times = [2 * self.work.parameters * size / rate for size, rate in zip(sizes, rates, strict=True)]
        products: npt.NDArray[np.float64] = np.interp(tokens, sizes, times)
        return products + self._calls(threads)

    def _calls(self, threads: int) -> float:
        return _CALLS_PER_LAYER * self.work.layers * self.profile.calls[threads]

    def threads(self) -> int:
        """Return the fewest threads that reach the share WITHIN of the best speed, for one stream and for prompts.

        If the two need different numbers, both should lose as little as possible. Fewer than all threads are chosen
        only if they are clearly sufficient.
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
        """Return the default size, unless another size is faster by more than the tolerance and the noise; then return
        the smallest of SIZES with which prompts reach the share WITHIN of the best speed.

        Longer steps need more memory, and streams wait longer for them. The estimate omits some costs of shorter steps.
        """
        measured = self.profile.rates[self.work.kind][self.profile.threads]
        each = {size: self.seconds(size) / size for size in SIZES if size in measured}
        most = min(each.values()) / WITHIN
        if each[USUAL] <= most * (1 + self.profile.noise):
            return USUAL
        return next(size for size in each if each[size] <= most)

    def tokens_within(self, seconds: float) -> int:
        """Return the most tokens, up to the largest of SIZES, of a step that takes at most this time; 0 if one token
        takes longer."""
        return int((self._seconds(np.arange(1, SIZES[-1] + 1)) <= seconds).sum())


def tokens_of_a_step(chunk: int, max_num_seqs: int) -> int:
    """Return the maximum number of tokens per step: the chunk, and more if many requests generate at the same time."""
    return max(chunk, max_num_seqs + _LEAST_BESIDE_STREAMS)
