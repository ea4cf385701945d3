"""Presence, frequency and repetition penalties, of the tokens that occur and of no others."""

import numpy as np
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.messages.step import NewRequest
from quire.sampling.logits_processors import LogitsProcessor, SamplingPlaces


class Penalties(LogitsProcessor):
    """logit > 0 ? logit / repetition : logit * repetition, where the token is in prompt or output; then minus
    frequency * (how often it is in the output) and minus presence * (whether it is).

    Works on the tokens of each row, [rows, longest]: the cost grows with the text, not with the vocabulary.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._penalties = np.zeros((config.scheduler.max_num_seqs, 3), np.float32)
        self._counts = torch.empty(0, 0, device=device)  # [rows, vocab], made on first use; rubbish between two calls

    def add(self, row: int, request: NewRequest) -> bool:
        p = request.sampling
        penalties = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        self._penalties[row] = penalties
        return penalties != (1.0, 0.0, 0.0)

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        place = np.arange(at.num_tokens.max())
        known = place < at.num_tokens[:, None]
        rows_tokens = at.all_token_ids[at.rows, : len(place)]
        # Behind its end, a row repeats its first token: every cell is then one that occurs.
        token_ids = self.upload(np.where(known, rows_tokens, rows_tokens[:, :1]).astype(np.int64))
        is_output = self.upload((known & (place >= at.num_prompt[:, None])).astype(np.float32))
        if len(self._counts) < len(at.rows):
            self._counts = torch.empty(len(at.rows), logits.shape[1], device=self.device)
        counts = self._counts[: len(at.rows)]
        counts.scatter_(1, token_ids, 0.0).scatter_add_(1, token_ids, is_output)
        count = counts.gather(1, token_ids)  # [rows, longest]: how often each cell's token is in the output
        repetition, frequency, presence = self.upload(self._penalties[at.rows]).T[:, :, None]
        cells = self.upload(at.index)[:, None], token_ids
        values = logits[cells]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * count + presence * (count > 0)
        logits[cells] = values  # a token that occurs twice gets the same value twice
