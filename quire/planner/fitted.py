"""Fitted step times: measured steps of a model on a machine, and the best-fitting function.

The function is a sum with nonnegative coefficients: a piecewise linear function of the step's tokens, and terms
proportional to its requests, places, cached keys and query-key pairs. Coefficients minimize the sum of relative errors
(least absolute deviations, by iteratively reweighted least squares).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.messages.errors import error_text
from quire.planner.sizes import Footprint
from quire.planner.work import StepWork, Window

VERSION = 1
_ROUNDS, _SWEEPS = 12, 400  # rounds of reweighting; sweeps of coordinate descent in each
_SMALL_ERROR = 0.01  # relative errors below this get equal weight
_Array = NDArray[np.float64]


class Sample(msgspec.Struct, frozen=True):
    """A measured step. seconds: of one run, or the median if the step was repeated."""

    work: StepWork
    seconds: float


class Fit(msgspec.Struct, frozen=True):
    """Measured steps of a model on a machine: the output of `quire plan measure`.

    shape: the model's shape, see `shape_of`. entries, operations: for each attention window, the bytes that its layers
    cache per token, and the operations of their scores; these are the weights of the windows. blocks: number of blocks
    of the engine's KV cache.
    """

    version: int
    model: str
    machine: str
    shape: str
    quantization: str | None
    windows: tuple[Window, ...]
    entries: tuple[float, ...]
    operations: tuple[float, ...]
    blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    samples: list[Sample]


class Fitted:
    """Step times fitted to samples. There is one stage, and the host's time is part of the step."""

    def __init__(self, fit: Fit) -> None:
        self.windows = fit.windows
        self._entries, self._operations = np.array(fit.entries), np.array(fit.operations)
        sizes = {sample.work.tokens for sample in fit.samples}
        self._knots = np.array(_knots(sizes), float)
        features = np.array([self._features(sample.work) for sample in fit.samples])
        self.coefficients = _fit(features, np.array([sample.seconds for sample in fit.samples]))

    def seconds(self, work: StepWork) -> float:
        return float(self._features(work) @ self.coefficients)

    def stages(self, works: Sequence[StepWork]) -> list[float]:
        return [max(map(self.seconds, works))]

    def host(self, works: Sequence[StepWork]) -> float:
        return 0.0

    def _features(self, work: StepWork) -> _Array:
        """Return the terms of the sum. Beyond the last knot, the function of the tokens grows proportionally to
        them."""
        knots = self._knots
        tokens = work.tokens
        hats = np.zeros(len(knots))
        index = int(np.searchsorted(knots, tokens))
        if index == len(knots):
            hats[-1] = tokens / knots[-1]
        elif index == 0:
            hats[0] = 1.0
        else:
            share = (tokens - knots[index - 1]) / (knots[index] - knots[index - 1])
            hats[index - 1], hats[index] = 1 - share, share
        terms = [
            float(work.requests),
            float(work.places > 0),
            float(work.places),
            float(work.prompts > 0),
            float(work.prompts),
            float(self._entries @ np.array(work.read)),
            float(self._entries @ np.array(work.keys)),
            float(self._operations @ np.array(work.pairs)),
        ]
        return np.concatenate((hats, terms))


def shape_of(footprint: Footprint) -> str:
    """Return the properties that step times depend on: the model's sizes, and the bytes of its weights."""
    spec = footprint.spec
    p = footprint.parameters
    return (
        f"{spec.num_layers} layers of {spec.hidden_size}, {p.total} parameters of which {p.active} are used, "
        f"vocabulary {spec.vocab_size}, {footprint.linear:.3g} bytes a weight"
    )


def write_fit(path: Path, fit: Fit) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(fit), indent=0))


def read_fit(path: Path, footprint: Footprint, quantization: str | None) -> Fit:
    """Read a Fit from a file. Raises OSError, and ValueError for an invalid file or one of another model."""
    try:
        fit = msgspec.json.decode(path.read_bytes(), type=Fit)
    except msgspec.MsgspecError as error:
        raise ValueError(f"fit={str(path)!r} is no file of quire plan measure: {error_text(error)}") from error
    if fit.version != VERSION:
        raise ValueError(f"fit={str(path)!r} was written by another version of Quire; measure again")
    if fit.shape != shape_of(footprint) or fit.quantization != quantization:
        ours = f"{shape_of(footprint)}, quantization {quantization}"
        raise ValueError(
            f"fit={str(path)!r} was measured with another model: {fit.model} ({fit.shape}, quantization "
            f"{fit.quantization}), but the plan is for one with {ours}"
        )
    if not fit.samples or any(sample.seconds <= 0 for sample in fit.samples):
        raise ValueError(f"fit={str(path)!r} has no measured steps, or one that took no time")
    return fit


def _knots(sizes: Any) -> list[int]:
    """Return 1, 2, 4, ... tokens, up to the largest measured step, and this step itself."""
    knots = []
    size = 1
    largest = max(sizes)
    while size < largest:
        if any(size / 1.42 <= measured <= size * 1.42 for measured in sizes):
            knots.append(size)
        size *= 2
    return [*knots, largest]


def _fit(features: _Array, seconds: _Array) -> _Array:
    """Return the nonnegative coefficients with the smallest sum of relative errors. features: [samples, terms]"""
    relative = features / seconds[:, None]
    scales = np.maximum(np.abs(relative).max(0), 1e-300)
    relative = relative / scales
    weights = np.ones(len(seconds))
    found = np.zeros(features.shape[1])
    for _ in range(_ROUNDS):
        weighted = relative * weights[:, None]
        found = _nonnegative_least_squares(weighted.T @ relative, weighted.sum(0), found)
        weights = 1 / np.maximum(np.abs(relative @ found - 1), _SMALL_ERROR)
    coefficients: _Array = found / scales
    return coefficients


def _nonnegative_least_squares(gram: _Array, target: _Array, start: _Array) -> _Array:
    """Return the x >= 0 that minimizes x gram x / 2 - target x, by coordinate descent."""
    x = start.copy()
    slack = gram.diagonal() + 1e-12
    for _ in range(_SWEEPS):
        before = x.copy()
        for i in range(len(x)):
            x[i] = max(0.0, x[i] + (target[i] - gram[i] @ x) / slack[i])
        if np.abs(x - before).max() < 1e-9 * max(1e-12, np.abs(x).max()):
            break
    return x
