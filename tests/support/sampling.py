"""Sampling of one request at a time in plain Python, the reference of the vectorized sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from quire.messages.sampling_params import SamplingParams
from quire.ops.reference.sampling import gumbel_noise
from quire.sampling.logits_processors import SamplingPlaces
from quire.worker.input_batch import InputBatch
from quire.worker.state import shared_state


def places(batch: InputBatch, rows: Sequence[int], num_tokens: Sequence[int] | None = None) -> SamplingPlaces:
    """Place i follows the first num_tokens[i] tokens of rows[i], by default all known tokens, and uses logits[i]."""
    of = np.asarray(rows)
    lengths = batch.num_tokens[of] if num_tokens is None else np.asarray(num_tokens)
    state, on_device = shared_state(batch), torch.from_numpy(lengths)
    return SamplingPlaces(np.arange(len(of)), of, batch.num_prompt[of], lengths, batch.token_ids, state, on_device)


def processed(
    logits: Sequence[float],
    prompt: list[int],
    output: list[int],
    params: SamplingParams,
    bad_words: Sequence[list[int]] = (),
    stop_token_ids: Sequence[int] = (),
) -> list[float]:
    """The logits after all processing that precedes the temperature."""
    made = list(logits)
    if params.allowed_token_ids is not None:
        made = [x if token in params.allowed_token_ids else -math.inf for token, x in enumerate(made)]
    for *before, last in bad_words:
        if not before or output[-len(before) :] == before:
            made[last] = -math.inf
    if len(output) < params.min_tokens:
        for token in stop_token_ids:
            if 0 <= token < len(made):
                made[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        made[token] += bias
    for token in {*prompt, *output}:
        made[token] *= params.repetition_penalty if made[token] < 0 else 1 / params.repetition_penalty
    for token in set(output):
        made[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return made


def distribution(logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The probabilities after temperature, min-p, top-k and top-p, in this order. Excluded tokens have zero."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    weights = [w if w >= min_p else 0.0 for w in weights]  # the largest weight is 1
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    for token in order[top_k:]:
        weights[token] = 0.0
    total, before = sum(weights), 0.0
    for token in order:
        probability = weights[token] / total
        if before >= top_p:
            weights[token] = 0.0
        before += probability
    return [w / sum(weights) for w in weights]


def gumbel_scores(probabilities: Sequence[float], seed: int, position: int) -> list[float]:
    """A score for each token. The token with the largest score is drawn."""
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), len(probabilities))[0].tolist()
    return [math.log(p) + n if p else -math.inf for p, n in zip(probabilities, noise, strict=True)]


def scores(logits: Sequence[float], params: SamplingParams, seed: int, position: int) -> list[float]:
    """A score for each token, given the processed logits. The request gets the token with the largest score."""
    if params.greedy:
        return list(logits)
    top_k = params.top_k if params.top_k > 0 else len(logits)
    allowed = distribution(logits, params.temperature, top_k, params.top_p, params.min_p)
    return gumbel_scores(allowed, seed, position)


def chi_square_bound(freedom: int) -> float:
    """The bound that a right distribution exceeds in one of ten thousand tests."""
    return freedom + 4 * math.sqrt(2 * freedom) + 8


def chi_square(observed: Sequence[int], probabilities: Sequence[float]) -> float:
    """Pearson's statistic. Tokens of probability zero must not have been observed."""
    count = sum(observed)
    assert all(seen == 0 for seen, p in zip(observed, probabilities, strict=True) if p == 0)
    return sum((seen - p * count) ** 2 / (p * count) for seen, p in zip(observed, probabilities, strict=True) if p > 0)
