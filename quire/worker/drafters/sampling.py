"""Samples drafts, and stores the data for their verification."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from quire.ops.reference.drafts import draft_seeds
from quire.sampling.sampler import Proposals, Sampler, SamplingBatch
from quire.worker.drafters.step import SampledStep
from quire.worker.input_batch import FlatBatch
from quire.worker.staging import Staging


class DraftSampling:
    """Samples drafts in the same way as the target model's tokens.

    The drafts of greedy or seeded requests are verified by comparison. So they are sampled greedily, or with the same
    noise as the target's tokens, which makes equal tokens likely. Drafts of other requests are sampled with separate
    noise, and verified by the rule of `accept_or_resample`, which needs the logits from which they were sampled.
    """

    def __init__(self, sampler: Sampler, staging: Staging, token_ids: Tensor | None = None) -> None:
        """token_ids: the target model's token id of each logits column, None if they are the same."""
        self.sampler = sampler
        self.staging = staging
        self.token_ids = token_ids
        self._place = np.full(len(staging.batch.num_tokens), -1, np.int64)  # index of a row in _logits, or -1
        self._logits: list[Tensor] = []  # by number of the draft, [requests that are verified by the rule, vocab]
        self._first: Tensor | None = None  # the position of the first draft of these requests

    def begin(self, step: SampledStep) -> None:
        """Begin to sample the drafts after a step."""
        rows = step.flat.rows
        batch = self.staging.batch
        state = self.staging.state
        arrays = batch.sampling(rows, batch.num_tokens[rows])
        random = batch.temperature[rows] > 0
        # A row that does not sample gets no new drafts; its earlier drafts are verified by comparison.
        by_rule = random & ~batch.has_seed[rows] & (step.flat.num_places > 0)
        self._place[:], self._logits = -1, []
        self._place[rows[by_rule]] = np.arange(by_rule.sum())
        if by_rule.any():
            arrays["by_rule"] = by_rule[random].nonzero()[0]
        tensors = self.staging.device.upload(arrays) if arrays else {}
        self._by_rule = tensors.pop("by_rule", None)
        self._batch = SamplingBatch.of(tensors)
        if self._batch.temperature is not None:
            random_rows = step.rows if self._batch.random is None else step.rows[self._batch.random]
            self._next_output = state.num_tokens[random_rows] - state.num_prompt[random_rows]
            if self._by_rule is not None:
                assert self._batch.seeds is not None
                self._first = state.num_tokens[random_rows[self._by_rule]]
                self._batch.seeds = self._batch.seeds.index_copy(
                    0, self._by_rule, draft_seeds(self._batch.seeds[self._by_rule])
                )

    def choose(self, logits: Tensor, number: int) -> Tensor:
        """Sample a draft. logits: [requests, columns] of the draft with this number -> [requests], int64"""
        if self._batch.temperature is None:
            tokens = self.sampler.argmax(logits)
            return tokens if self.token_ids is None else self.token_ids[tokens]
        if self.token_ids is not None:
            whole = logits.new_full((len(logits), self.staging.batch.vocab_size), float("-inf"))
            logits = whole.index_copy_(1, self.token_ids, logits)
        batch = replace(self._batch, output_positions=self._next_output + number)
        if self._by_rule is None:
            return self.sampler(logits, batch)[0]
        tokens, limited = self.sampler.draw_limited(logits, batch)
        self._logits.append(limited[self._by_rule])
        return tokens

    def proposals(self, flat: FlatBatch, rows: Tensor, positions: Tensor) -> Proposals | None:
        """Return the drafts of a step that are verified by the rule. rows, positions: of the step's places."""
        is_draft = np.arange(len(flat.place_rows)) + 1 < np.repeat(flat.place_start_loc[1:], flat.num_places)
        places = (is_draft & (self._place[flat.place_rows] >= 0)).nonzero()[0]
        if not len(places) or not self._logits or self._first is None:
            return None
        random = self.staging.batch.temperature[flat.place_rows] > 0
        arrays = {
            "places": places,
            "among_random": (random.cumsum() - 1)[places],
            "owners": self._place[flat.place_rows[places]],
        }
        tensors = self.staging.device.upload(arrays)
        rows = rows[tensors["places"]]
        following = positions[tensors["places"]] + 1
        owners = tensors["owners"]
        logits = torch.stack(self._logits)[following - self._first[owners], owners]
        drafts = self.staging.state.token_ids[rows, following].long()
        return Proposals(tensors["among_random"], logits, drafts)
