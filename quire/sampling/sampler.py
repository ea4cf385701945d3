"""From logits to token ids, for all places of a step at once. Requests that ask for nothing pay nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.ops import Kernels
from quire.ops.memory import upload
from quire.sampling.logits_processors import Ints, LogitsProcessor, LogitsProcessors, SamplingPlaces, load_plugins
from quire.sampling.logprobs import TopLogprobs
from quire.sampling.penalties import Penalties
from quire.sampling.token_rules import AllowedTokenIds, BadWords, LogitBias, MinTokens, RequestFunctions


@dataclass
class SamplingBatch:
    """The parameters of the places of a step, as tensors over those that are not greedy; None where none asks for it.

    num_logprobs, named_tokens and places are about all places.
    """

    random: Tensor | None = None  # int64: which places are not greedy, None for all (if there is a temperature)
    temperature: Tensor | None = None  # None: every place is greedy
    seeds: Tensor | None = None  # int64
    output_positions: Tensor | None = None  # int64: how many tokens of output come before
    top_k: Tensor | None = None  # int64, vocab_size where a place has none
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    num_logprobs: Ints | None = None  # -1 where a place has none
    named_tokens: Ints | None = None  # [places with logprobs, most]: the tokens they are of, -1 for the likeliest
    places: SamplingPlaces | None = None  # for logits processors

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """tensors: of these names"""
        return cls(**tensors)  # type: ignore[arg-type]


class Sampler:
    """In this order, vLLM's: logprobs of the logits as they are; allowed tokens, bad words, min_tokens, logit_bias,
    functions of the request, plugins, penalties; then arg-max, or temperature, min-p, top-k, top-p and a draw that
    depends on (seed, position) alone.
    """

    def __init__(self, kernels: Kernels, config: EngineConfig, device: torch.device) -> None:
        """Raises ConfigError for a plugin that cannot be loaded."""
        self.argmax = kernels.argmax
        self.sample_gumbel, self.keep_top_k_top_p = kernels.sample_gumbel, kernels.keep_top_k_top_p
        mode = config.sampling.logprobs_mode
        self._scores_processed, self._scores_are_logits = mode.startswith("processed"), mode.endswith("logits")
        rules = AllowedTokenIds, BadWords, MinTokens, LogitBias, RequestFunctions
        kinds: list[type[LogitsProcessor]] = [*rules, *load_plugins(config.sampling.logits_processors), Penalties]
        self.processors = LogitsProcessors([kind(config, device) for kind in kinds], config.scheduler.max_num_seqs)

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, TopLogprobs | None]:
        """logits: [places, vocab], any float type, may be overwritten -> token ids [places], int64, and logprobs of the
        places that ask for some, in their order."""
        asks, scores = None, None
        if batch.num_logprobs is not None:
            asks = upload(np.flatnonzero(batch.num_logprobs >= 0), logits.device)
            if not self._scores_processed:
                scores = self.score(logits if len(asks) == len(logits) else logits[asks])
        if batch.places is not None:
            logits = self.processors.apply(logits, batch.places)
        if batch.temperature is None:
            tokens = self.argmax(logits)
        else:
            tokens, logits = self._draw(logits, batch, batch.temperature)
        if asks is None or batch.num_logprobs is None:
            return tokens, None
        scores = self.score(logits[asks]) if scores is None else scores
        named = None if batch.named_tokens is None else upload(batch.named_tokens, logits.device)
        return tokens, TopLogprobs.of(scores, tokens[asks], int(batch.num_logprobs.max()), named)

    def score(self, logits: Tensor) -> Tensor:
        """What is reported of logits [places, vocab], as a copy: log-probabilities, or what logprobs_mode says."""
        return logits.to(torch.float32, copy=True) if self._scores_are_logits else logits.log_softmax(-1, torch.float32)

    def _draw(self, logits: Tensor, batch: SamplingBatch, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, and what they were drawn from (if anybody wants to know that)."""
        random = batch.random
        scaled = (logits if random is None else logits[random]).float() / temperature[:, None]
        if batch.min_p is not None:
            floor = scaled.amax(-1, keepdim=True) + batch.min_p[:, None].log()
            scaled.masked_fill_(scaled < floor, float("-inf"))
        if batch.top_k is not None or batch.top_p is not None:
            scaled = self.keep_top_k_top_p(scaled, batch.top_k, batch.top_p)
        drawn: Tensor = self.sample_gumbel(scaled, batch.seeds, batch.output_positions)
        if random is None:
            return drawn, scaled
        tokens: Tensor = self.argmax(logits)
        tokens[random] = drawn
        if self._scores_processed:
            logits = logits.float()
            logits[random] = scaled
        return tokens, logits
