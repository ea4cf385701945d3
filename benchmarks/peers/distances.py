"""Measures how far next-token distributions diverge from those of a reference. Needs only numpy, since peers'
environments may have nothing else.

A run consists of windows of token ids. The rows of a window are the logits after each of its tokens except the last.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def read_windows(path: Path) -> list[list[int]]:
    windows: list[list[int]] = json.loads(path.read_text())
    return windows


def log_softmax(logits: Array) -> Array:
    """[rows, vocab] -> the same in float64"""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


@dataclass
class Distances:
    """The results over all rows so far. divergences: the Kullback-Leibler divergences from the reference, in nats."""

    reference: Array  # logits [rows of all windows, vocab]
    divergences: list[float] = field(default_factory=list)
    agreements: list[bool] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # -log(probability of the token that follows)

    def add(self, logits: Array, following: list[int]) -> None:
        """logits: [rows, vocab] of the next rows; following: the tokens that follow them."""
        at = len(self.divergences)
        for row, token in zip(logits, following, strict=True):
            expected = log_softmax(self.reference[at])
            found = log_softmax(row[: self.reference.shape[1]])
            self.divergences.append(float((np.exp(expected) * (expected - found)).sum()))
            self.agreements.append(bool(expected.argmax() == found.argmax()))
            self.losses.append(-float(found[token]))
            at += 1

    def summary(self) -> dict[str, float]:
        """Return the mean divergence, its standard error and the maximum; the share of rows with the reference's most
        likely token; and the perplexity of the texts.
        """
        values = np.array(self.divergences)
        return {
            "mean": float(values.mean()),
            "error": float(values.std() / np.sqrt(len(values))),
            "maximum": float(values.max()),
            "top1": float(np.mean(self.agreements)),
            "perplexity": float(np.exp(np.mean(self.losses))),
        }
