"""Samples token ids from logits, for all places of a step at once. Options that no request uses cost nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.ops import Kernels
from quire.ops.memory import upload
from quire.ops.reference.sampling import scale
from quire.sampling.logits_processors import Ints, LogitsProcessors, MakeProcessor, SamplingPlaces, load_plugins
from quire.sampling.logprobs import TopLogprobs
from quire.sampling.penalties import Penalties
from quire.sampling.token_rules import AllowedTokenIds, BadWords, LogitBias, MinTokens, RequestFunctions


@dataclass
class Proposals:
    """Drafts to be accepted or resampled; see the op accept_or_resample.

    places: their indices among the places that are not greedy. logits: [drafts, vocab], from which they were drawn.
    """

    places: Tensor
    logits: Tensor
    drafts: Tensor


@dataclass
class SamplingBatch:
    """The sampling parameters of a step. The tensors have one element per non-greedy place. A parameter that no place
    uses is None.

    num_logprobs, named_tokens, places and proposals describe all places.
    """

    random: Tensor | None = None  # int64: indices of the places that are not greedy; None if all are not
    temperature: Tensor | None = None  # None: every place is greedy
    seeds: Tensor | None = None  # int64
    output_positions: Tensor | None = None  # int64: number of output tokens before the place
    top_k: Tensor | None = None  # int64, vocab_size where a place has none
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    num_logprobs: Ints | None = None  # -1 where a place has none
    named_tokens: Ints | None = None  # [places with logprobs, most]: token ids to report, -1 for the likeliest
    places: SamplingPlaces | None = None  # for logits processors
    proposals: Proposals | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Self:
        """tensors: the parameters by name"""
        return cls(**tensors)  # type: ignore[arg-type]


class Sampler:
    """Samples in the same order as vLLM:

    1. logprobs of the unchanged logits (unless logprobs_mode says processed);
    2. logits processors: allowed tokens, bad words, min_tokens, logit_bias, functions of the request, plugins,
       penalties;
    3. arg-max for greedy places; for others temperature, min-p, top-k, top-p, and a draw whose noise depends only on
       (seed, position).
    """

    def __init__(
        self, kernels: Kernels, config: EngineConfig, device: torch.device, own: MakeProcessor | None = None
    ) -> None:
        """own: creates the model's own logits processor. Raises ConfigError for a plugin that cannot be loaded."""
        self.argmax = kernels.argmax
        self.log_softmax = kernels.log_softmax
        self.sample_gumbel = kernels.sample_gumbel
        self.keep_top_k_top_p = kernels.keep_top_k_top_p
        self.accept_or_resample = kernels.accept_or_resample
        mode = config.sampling.logprobs_mode
        self._scores_processed, self._scores_are_logits = mode.startswith("processed"), mode.endswith("logits")
        rules = AllowedTokenIds, BadWords, MinTokens, LogitBias, RequestFunctions
        kinds: list[MakeProcessor] = [*rules, *load_plugins(config.sampling.logits_processors), Penalties]
        kinds += [] if own is None else [own]
        self.processors = LogitsProcessors([kind(config, device) for kind in kinds], config.scheduler.max_num_seqs)

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, TopLogprobs | None]:
        """Return token ids [places], int64, and the logprobs of the places that request them, in order.

        logits: [places, vocab], of any float type. They may be overwritten.
        """
        asks = None
        scores = None
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
        """Return a copy of the scores to report for logits [places, vocab]: log-probabilities or, depending on
        logprobs_mode, the logits themselves."""
        if self._scores_are_logits:
            return logits.to(torch.float32, copy=True)
        scores: Tensor = self.log_softmax(logits)
        return scores

    def draw_limited(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Return the sampled tokens, and the logits from which the tokens of non-greedy places were drawn: divided by
        the temperature, and -inf for tokens that min-p, top-k and top-p exclude."""
        limited = self._limited(logits if batch.random is None else logits[batch.random], batch)
        drawn: Tensor = self.sample_gumbel(limited, batch.seeds, batch.output_positions)
        return self._with_greedy(logits, batch, drawn), limited

    def _limited(self, chosen: Tensor, batch: SamplingBatch, rows: Tensor | None = None) -> Tensor:
        """chosen: the logits of the non-greedy places, or only of those with the indices `rows`."""
        columns = batch.temperature, batch.min_p, batch.top_k, batch.top_p
        temperature, min_p, top_k, top_p = (c if c is None or rows is None else c[rows] for c in columns)
        chosen = scale(chosen, temperature, min_p)
        if top_k is not None or top_p is not None:
            chosen = self.keep_top_k_top_p(chosen, top_k, top_p)
        return chosen

    def _draw(self, logits: Tensor, batch: SamplingBatch, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sampled tokens, and the logits they were drawn from, for processed logprobs."""
        random = batch.random
        proposals = batch.proposals
        chosen = logits if random is None else logits[random]
        limited = drafter = None
        if proposals is not None:  # its logits are copied before anything overwrites them
            allowed = chosen[proposals.places]
            limited = self._limited(allowed, batch, proposals.places)
            # Drafts that a grammar forbids have been cut off, so the drafts that remain were not drawn from the tokens
            # that are -inf here. The minimum excludes these, in a quarter of the time of masked_fill.
            drafter = torch.minimum(proposals.logits, allowed + 1e30)
        if self._scores_processed:
            chosen = self._limited(chosen, batch)
            drawn: Tensor = self.sample_gumbel(chosen, batch.seeds, batch.output_positions)
        else:
            limits = batch.min_p, batch.top_k, batch.top_p
            drawn = self.sample_gumbel(chosen, batch.seeds, batch.output_positions, temperature, *limits)
        if proposals is not None and batch.seeds is not None and batch.output_positions is not None:
            noise = batch.seeds[proposals.places], batch.output_positions[proposals.places]
            drawn[proposals.places] = self.accept_or_resample(limited, drafter, proposals.drafts, *noise)
        if random is not None and self._scores_processed:
            tokens = self._with_greedy(logits, batch, drawn)
            logits = logits.float()
            logits[random] = chosen
            return tokens, logits
        return self._with_greedy(logits, batch, drawn), chosen if random is None else logits

    def _with_greedy(self, logits: Tensor, batch: SamplingBatch, drawn: Tensor) -> Tensor:
        """Return the tokens of all places. drawn: the tokens of the non-greedy places."""
        if batch.random is None:
            return drawn
        tokens: Tensor = self.argmax(logits)
        tokens[batch.random] = drawn
        return tokens
