"""Drafters that read hidden states of the target model: chained heads (EAGLE, MTP) and parallel heads."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from quire.kv.specs import FullAttentionSpec
from quire.layers.forward_state import ForwardState
from quire.messages.step import NewRequest
from quire.models.heads.head import ChainHead, StateHead
from quire.sampling.sampler import Sampler
from quire.worker.drafters.drafter import Drafter, DraftInputs
from quire.worker.drafters.sampling import DraftSampling
from quire.worker.drafters.step import SampledStep
from quire.worker.forward import Forward
from quire.worker.staging import Staging


class HeadLayers:
    """The layers of a head, as the part of a model that Forward calls."""

    def __init__(self, head: ChainHead) -> None:
        self.head = head
        self.rotary = head.rotary

    def forward(
        self, x: Tensor, state: ForwardState, wanted: Tensor | None = None, taps: Mapping[int, Tensor] = {}
    ) -> Tensor:
        return self.head.forward(x, state, wanted)


class ChainDrafter(Drafter):
    """Guesses one token after the other with a ChainHead, or all of them in one forward if the head can.

    The head sees the prompts, and all tokens of the steps after which drafts are requested. It misses tokens generated
    while the device is too busy for drafts, since reading them would not save time. Later, it attends only to the
    tokens it has seen. The entries of its cache have no gaps, and RoPE encodes their true positions.
    """

    def __init__(
        self,
        head: ChainHead,
        forward: Forward,
        eager: Forward,
        staging: Staging,
        sampler: Sampler,
        most_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        """eager: a forward that computes only what the requested tokens need. most_tokens: of a step. hidden_size,
        dtype: of the target model."""
        self.head = head
        self.forward = forward
        self.eager = eager
        self.state = staging.state
        self.inputs = DraftInputs(staging, len(head.kv_specs))
        self.sampling = DraftSampling(sampler, staging, head.token_ids)
        # How many tokens of each row the head has missed. It must not miss any if requests free old blocks outside a
        # window, since its entries could be in these blocks.
        self._missed = np.zeros(len(staging.batch.num_tokens), np.int64)
        self._may_miss = isinstance(staging.batch.kv_specs[self.inputs.group], FullAttentionSpec)
        self._upload = staging.device.upload
        device = staging.device.torch_device
        self.taps = {layer: torch.empty(most_tokens, hidden_size, dtype=dtype, device=device) for layer in head.taps}

    def reads_hidden(self, count: int) -> bool:
        return not self.head.taps

    def install(self, new: NewRequest) -> None:
        self._missed[new.row] = 0

    def draft(self, step: SampledStep, count: int) -> Tensor | None:
        if not count and self._may_miss and step.flat.tokens_per_request == 1:
            self._missed[step.flat.rows] += 1
            return None
        missed = None
        if self._missed[step.flat.rows].any():
            missed = self._upload({"missed": self._missed.copy()})["missed"]
        inputs = self.inputs.of(step, missed)
        head = self.head
        tokens = len(step.token_rows)
        last = step.last_kept()
        if not head.taps:
            assert step.hidden is not None
            hidden = head.combine([step.hidden])
        else:
            hidden = head.combine([self.taps[layer][: inputs.size.tokens] for layer in head.taps])
        following = torch.zeros_like(inputs.positions)  # padded tokens have no successor
        following[:tokens] = self.state.token_ids[step.token_rows, inputs.positions[:tokens] + 1]
        x = head.embed(following, hidden)
        if not count:
            self.eager.layers(x, inputs, last[:0])
            return None
        hidden = self.forward.layers(x, inputs, last)
        self.sampling.begin(step)
        drafts = [self.sampling.choose(head.logits(hidden), 0)]
        first = inputs.positions[last] + 1
        width = self.inputs.width(step, count)
        if head.mask is not None and count > 1:
            return self._at_once(step, drafts[0], first, count, width, missed)
        for number in range(1, count):
            ids = drafts[-1]
            inputs = self.inputs.uniform(step, first + number - 1, 1, ids, width, missed)
            hidden = self.forward.layers(head.embed(ids, hidden), inputs)
            drafts.append(self.sampling.choose(head.logits(hidden), number))
        return torch.stack(drafts, 1)

    def _at_once(
        self, step: SampledStep, draft: Tensor, first: Tensor, count: int, width: int, missed: Tensor | None
    ) -> Tensor:
        """Return the drafts after the first one, computed from mask tokens in the places of the unknown tokens."""
        assert self.head.mask is not None
        (mask, hidden), masks = self.head.mask, count - 1
        ids = torch.full((len(first) * masks,), mask, dtype=torch.int64, device=first.device)
        inputs = self.inputs.uniform(step, first, masks, ids, width, missed)
        guessed = self.forward.layers(self.head.embed(ids, hidden.expand(len(ids), -1)), inputs)
        logits = self.head.logits(guessed).view(len(first), masks, -1)
        return torch.stack([draft, *(self.sampling.choose(logits[:, i], i + 1) for i in range(masks))], 1)


class StateDrafter(Drafter):
    """Guesses all tokens from the last hidden state of each request with a StateHead."""

    def __init__(self, head: StateHead, staging: Staging, sampler: Sampler) -> None:
        self.head, self.state, self.sampling = head, staging.state, DraftSampling(sampler, staging)

    def reads_hidden(self, count: int) -> bool:
        return count > 0

    def draft(self, step: SampledStep, count: int) -> Tensor | None:
        if not count:
            return None
        assert step.hidden is not None
        self.sampling.begin(step)
        newest = self.state.token_ids[step.rows, self.state.num_tokens[step.rows] - 1].long()
        return self.head.draft(step.hidden[step.last_kept()], newest, count, self.sampling.choose)
