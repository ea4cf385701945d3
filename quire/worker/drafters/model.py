"""A drafter that is a separate small model with the target model's vocabulary."""

import numpy as np
import torch
from torch import Tensor

from quire.messages.step import NewRequest, TokenEdits
from quire.models.model import Model
from quire.sampling.logits_processors import Ints
from quire.sampling.sampler import Sampler
from quire.worker.drafters.drafter import Drafter, DraftInputs
from quire.worker.drafters.sampling import DraftSampling
from quire.worker.drafters.step import SampledStep
from quire.worker.forward import Forward
from quire.worker.input_batch import FlatBatch, Spans
from quire.worker.staging import Staging


class ModelDrafter(Drafter):
    """Guesses one token after another, or all in one forward if `mask` is given (PARD, arXiv:2504.18583).

    The draft model computes tokens only when drafts are requested. It then catches up on the tokens it has missed. In
    each round, its first forward computes the last two tokens of a text: the newest one and its predecessor, which may
    be the last accepted draft of its step.
    """

    def __init__(
        self,
        model: Model,
        forward: Forward,
        staging: Staging,
        sampler: Sampler,
        most_tokens: int,
        mask: int | None = None,
    ) -> None:
        """most_tokens: of a forward. mask: the token that represents unknown tokens, None to guess one token after
        another."""
        self.model = model
        self.forward = forward
        self.staging = staging
        self.mask = mask
        self.inputs = DraftInputs(staging, len(model.kv_specs))
        vocab = staging.batch.vocab_size
        ids = torch.arange(model.vocab_size, device=staging.device.torch_device)
        self.sampling = DraftSampling(sampler, staging, None if model.vocab_size == vocab else ids)
        self.most_tokens = most_tokens
        rows = len(staging.batch.num_tokens)
        self._covered = np.zeros(rows, np.int64)  # tokens of each row that the draft model has computed
        self._is_current = np.zeros(rows, bool)  # it has computed all tokens known after the previous step
        self._num_forced = np.zeros(rows, np.int64)  # tokens added since then without being sampled
        self._is_new = np.zeros(rows, bool)  # the row's first tokens may come from the prefix cache
        self._is_complete = np.ones(1, bool)  # by block: whether all tokens were computed; block 0 is null

    def install(self, new: NewRequest) -> None:
        self._covered[new.row], self._is_current[new.row] = new.num_computed_tokens, False
        self._is_new[new.row], self._num_forced[new.row] = True, 0

    def extend(self, known: TokenEdits) -> None:
        np.add.at(self._num_forced, known.rows, 1)

    def draft(self, step: SampledStep, count: int) -> Tensor | None:
        flat = step.flat
        # Tokens whose ids were known when the step began: all except its drafts.
        known = flat.seq_lens.astype(np.int64) - np.maximum(flat.num_places - 1, 0)
        self._find_cached(flat)
        current = known - self._num_forced[flat.rows]
        covered = np.where(self._is_current[flat.rows], current, self._covered[flat.rows])
        self._cover(flat.rows, covered)
        self._is_current[flat.rows], self._num_forced[flat.rows] = False, 0
        if not count:
            return None
        # The forwards below compute the last two tokens of rows that have sampled.
        missing = known - covered
        self._catch_up(flat.rows, covered, np.where(missing > (flat.num_places > 0), missing, 0))
        self._cover(flat.rows, known)
        self._is_current[flat.rows] = flat.num_places > 0
        self.sampling.begin(step)
        if self.mask is not None:
            return self._at_once(step, count, self.mask)
        state = self.staging.state
        width = self.inputs.width(step, count)
        first = (state.num_tokens[step.rows] - 2).clamp_(min=0)
        ids = state.token_ids[step.rows[:, None], first[:, None] + torch.arange(2, device=first.device)].long()
        hidden = self._forward(step, first, ids, width)[1::2]
        drafts: list[Tensor] = []
        for number in range(count):
            drafts.append(self.sampling.choose(self.model.logits(hidden), number))
            if number + 1 < count:
                hidden = self._forward(step, first + number + 2, drafts[-1][:, None], width)
        return torch.stack(drafts, 1)

    def _at_once(self, step: SampledStep, count: int, mask: int) -> Tensor:
        """Return all drafts from one forward. The draft model has seen masks in the places of this step's drafts, so
        accepted ones are recomputed."""
        state = self.staging.state
        recent = 1 + int(step.flat.num_places.max())
        lengths = state.num_tokens[step.rows][:, None]
        first = (lengths - recent).clamp_(min=0)
        numbers = torch.arange(recent + count - 1, device=first.device)
        positions = first + numbers
        ids = state.token_ids[step.rows[:, None], positions.clamp(max=state.token_ids.shape[1] - 1)].long()
        ids = torch.where(positions < lengths, ids, mask)
        guessed = self._forward(step, first[:, 0], ids, self.inputs.width(step, recent + count))
        last = lengths - 1 - first + torch.arange(len(ids), device=first.device)[:, None] * ids.shape[1]
        logits = self.model.logits(guessed[(last + numbers[:count]).view(-1)]).view(len(ids), count, -1)
        return torch.stack([self.sampling.choose(logits[:, i], i) for i in range(count)], 1)

    def _forward(self, step: SampledStep, first: Tensor, ids: Tensor, width: int) -> Tensor:
        """Return the hidden states [requests * count] of the tokens ids [requests, count], which start at the positions
        `first` [requests]."""
        ids = ids.clamp(max=self.model.vocab_size - 1).view(-1)  # the target's vocabulary may be larger
        return self.forward(self.inputs.uniform(step, first, len(ids) // len(first), ids, width))

    def _find_cached(self, flat: FlatBatch) -> None:
        """Find out for how many cached prefix tokens of new rows the draft model's entries exist, too. The target model
        may have computed them when no drafts were requested."""
        batch = self.staging.batch
        tables = batch.block_tables[self.inputs.group]
        size = batch.block_size
        if (missing := int(tables[flat.rows].max()) + 1 - len(self._is_complete)) > 0:
            self._is_complete = np.pad(self._is_complete, (0, missing))
        self._is_complete[tables[flat.token_rows, flat.positions // size]] = False  # they receive other tokens
        self._is_complete[0] = True
        for row in flat.rows[self._is_new[flat.rows]].tolist():
            cached = tables[row, : self._covered[row] // size]
            if not (complete := self._is_complete[cached]).all():
                self._covered[row] = complete.argmin() * size
        self._is_new[flat.rows] = False

    def _cover(self, rows: Ints, ends: Ints) -> None:
        """Record that the draft model has computed the tokens of rows[i] up to ends[i]."""
        tables = self.staging.batch.block_tables[self.inputs.group]
        size = self.staging.batch.block_size
        first = self._covered[rows] // size
        blocks = Spans.of(rows, first, np.maximum(ends // size - first, 0))  # by their number in the row
        self._is_complete[tables[blocks.token_rows, blocks.positions]] = True
        self._covered[rows] = ends

    def _catch_up(self, rows: Ints, covered: Ints, counts: Ints) -> None:
        """Compute the next counts[i] tokens of rows[i], after its covered[i] computed tokens."""
        while counts.any():
            now = np.minimum(counts, np.maximum(self.most_tokens - (counts.cumsum() - counts), 0))
            behind = now.nonzero()[0]
            spans = Spans.of(rows[behind], covered[behind], now[behind])
            inputs = self.staging.stage_spans(spans, self.inputs.group, self.inputs.groups)
            inputs.input_ids.clamp_(max=self.model.vocab_size - 1)
            self.forward.layers(self.forward.embed(inputs), inputs, inputs.positions.new_zeros(1))
            covered = covered + now
            counts = counts - now
