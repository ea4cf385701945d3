"""Presence, frequency and repetition penalties. Only the logits of tokens that occur in the text are changed."""

import numpy as np
import torch
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.messages.step import NewRequest
from quire.sampling.logits_processors import LogitsProcessor, SamplingPlaces


class Penalties(LogitsProcessor):
    """Applies the penalties of SamplingParams, in this order:

    - repetition, for tokens of prompt or output: logit / repetition if logit > 0, else logit * repetition;
    - frequency: logit - frequency * (how often the token occurs in the output);
    - presence: logit - presence, if the token occurs in the output.

    Reads the tokens before each place, [places, longest], on the device. The cost grows with the length of the text,
    not with the vocabulary.
    """

    needs_host_tokens = False

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._penalties = torch.zeros(config.scheduler.max_num_seqs, 3, device=device)  # for rows that use them
        self._counts = torch.empty(0, 0, device=device)  # [places, vocab], scratch memory, allocated on first use

    def add(self, row: int, request: NewRequest) -> bool:
        p = request.sampling
        penalties = p.repetition_penalty, p.frequency_penalty, p.presence_penalty
        asks = penalties != (1.0, 0.0, 0.0)
        if asks:
            self._penalties[row] = self.upload(np.array(penalties, np.float32))
        return asks

    def apply(self, logits: Tensor, at: SamplingPlaces) -> None:
        rows = self.upload(at.rows)
        index = self.upload(at.index)[:, None]
        token_ids = at.state.token_ids[:, : at.num_tokens.max()].index_select(0, rows)
        position = torch.arange(token_ids.shape[1], device=self.device)
        known = position < at.lengths[:, None]
        # Cells past the end of a text repeat its first token, so that every cell has a token of the text.
        token_ids = torch.where(known, token_ids, token_ids[:, :1]).long()
        is_output = known & (position >= at.state.num_prompt[rows][:, None])
        if len(self._counts) < len(rows):
            self._counts = torch.empty(len(rows), logits.shape[1], device=self.device)
        counts = self._counts[: len(rows)]
        counts.scatter_(1, token_ids, 0.0).scatter_add_(1, token_ids, is_output.float())
        count = counts.gather(1, token_ids)  # [places, longest]: how often each cell's token is in the output
        repetition, frequency, presence = self._penalties[rows].T[:, :, None]
        values = logits[index, token_ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * count + presence * (count > 0)
        logits[index, token_ids] = values  # a token that occurs twice gets the same value twice
