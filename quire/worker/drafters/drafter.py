"""Drafters guess the next tokens of requests on the device, right after the sampling of each step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from quire.attention.base import CacheBackend
from quire.kv.specs import FullAttentionSpec, KVCacheSpec, ModelKVSpec
from quire.layers.step_inputs import Array, StepInputs, StepSize
from quire.messages.step import NewRequest, SchedulerOutput, TokenEdits
from quire.models.model import Shape
from quire.sampling.sampler import Proposals
from quire.worker.drafters.sampling import DraftSampling
from quire.worker.drafters.step import SampledStep
from quire.worker.input_batch import FlatBatch
from quire.worker.staging import Staging


class Cached(Protocol):
    """A part of a drafter that has a KV cache. See Model for the attributes."""

    kv_specs: Sequence[ModelKVSpec]
    cache_shapes: Sequence[Shape]

    def bind_cache(self, backends: Sequence[CacheBackend], memory: Sequence[Tensor]) -> None: ...


class Drafter(ABC):
    """taps: the tensors that receive hidden states of the target model, see Model.forward. sampling: draws drafts."""

    taps: Mapping[int, Tensor] = {}
    sampling: DraftSampling

    def arrays(self, flat: FlatBatch, step: SchedulerOutput) -> dict[str, Array]:
        """Return the arrays that `note` needs on the device."""
        return SampledStep.arrays(flat, step, self.sampling.staging.batch.max_model_len)

    def note(
        self, flat: FlatBatch, inputs: StepInputs, hidden: Tensor | None, on_device: Mapping[str, Tensor]
    ) -> SampledStep | None:
        """Return the data of a step that `draft` needs. hidden: of its tokens, [tokens, hidden], if the drafter reads
        them."""
        return SampledStep.of(flat, inputs, hidden, on_device)

    def proposals(self, flat: FlatBatch, rows: Tensor, positions: Tensor) -> Proposals | None:
        """See DraftSampling."""
        return self.sampling.proposals(flat, rows, positions)

    def reads_hidden(self, count: int) -> bool:
        """Whether it reads the final hidden states of a step after which `count` drafts are requested."""
        return False

    def install(self, new: NewRequest) -> None:  # noqa: B027  # most need not record anything
        """Called when a request enters the batch, for the first time or again."""

    def extend(self, known: TokenEdits) -> None:  # noqa: B027
        """Called when texts are extended by tokens that were not sampled and that the next step computes."""

    @abstractmethod
    def draft(self, step: SampledStep, count: int) -> Tensor | None:
        """Return the next `count` tokens of each request, [requests, count], int64. If count is 0, the drafter may only
        record data of the step; then, and only then, it returns None."""


class NoDrafter(Drafter):
    """For a model whose drafts, if any, are made on the host."""

    def arrays(self, flat: FlatBatch, step: SchedulerOutput) -> dict[str, Array]:
        return {}

    def note(
        self, flat: FlatBatch, inputs: StepInputs, hidden: Tensor | None, on_device: Mapping[str, Tensor]
    ) -> SampledStep | None:
        return None

    def proposals(self, flat: FlatBatch, rows: Tensor, positions: Tensor) -> Proposals | None:
        return None

    def draft(self, step: SampledStep, count: int) -> Tensor | None:
        return None


class DraftInputs:
    """Makes the inputs of a drafter's forwards. They use the blocks of the target model's requests: each block has room
    for the drafter's entries after the target's."""

    def __init__(self, staging: Staging, groups: int) -> None:
        """groups: the number of the drafter's KV groups."""
        batch = staging.batch
        self.staging = staging
        self.groups = groups
        self.block_size = batch.block_size
        self.longest = batch.max_model_len
        self.group = shared_group(batch.kv_specs)

    def of(self, step: SampledStep, missed: Tensor | None = None) -> StepInputs:
        """Return the inputs of a forward over the same tokens as the target's. missed: see `uniform`."""
        inputs = step.inputs
        slots = inputs.slot_mapping[self.group]
        seq_lens = inputs.seq_lens
        table = inputs.block_tables[self.group]
        if missed is not None:
            tokens = len(step.token_rows)
            requests = len(step.rows)
            entries = inputs.positions[:tokens] - missed[step.token_rows]
            blocks = self.staging.state.block_tables[self.group, step.token_rows, entries // self.block_size]
            slots, seq_lens = slots.clone(), seq_lens.clone()  # padding may follow
            slots[:tokens] = blocks.long() * self.block_size + entries % self.block_size
            seq_lens[:requests] -= missed[step.rows].int()
        return replace(
            inputs,
            size=inputs.size._replace(adapted=False),  # drafters have no adapters
            adapters=None,
            slot_mapping=slots.expand(self.groups, -1),
            seq_lens=seq_lens,
            block_tables=table.expand(self.groups, -1, -1),
        )

    def uniform(
        self, step: SampledStep, first: Tensor, count: int, ids: Tensor, width: int, missed: Tensor | None = None
    ) -> StepInputs:
        """Return the inputs of a forward over `count` tokens of each request, starting at the positions `first`
        [requests]. ids: [requests * count]. width: the most tokens of a request, including these. missed: [rows], how
        many tokens the drafter has not seen; its entries have no gaps, so the cache is shorter than the text by this
        number."""
        requests = len(first)
        device = first.device
        positions = (first[:, None] + torch.arange(count, device=device)).clamp_(max=width - 1)
        entries = positions if missed is None else positions - missed[step.rows, None]
        blocks = -(-width // self.block_size)
        table = self.staging.state.block_tables[self.group, :, :blocks].index_select(0, step.rows)
        slots = table.gather(1, entries // self.block_size) * self.block_size + entries % self.block_size
        slots = torch.where(positions < step.limits[:, None], slots, -1).view(-1)
        offsets = step.inputs.rotary_offsets
        if offsets is not None:  # drafts have the rotary offset of the last kept token
            offsets = offsets.index_select(1, step.last_kept()).repeat_interleave(count, 1)
        return StepInputs(
            size=StepSize(requests * count, requests, count),
            input_ids=ids,
            positions=positions.view(-1),
            slot_mapping=slots.expand(self.groups, -1),
            query_start_loc=torch.arange(0, requests * count + 1, count, dtype=torch.int32, device=device),
            seq_lens=entries[:, -1].int() + 1,
            block_tables=table.expand(self.groups, -1, -1),
            rotary_offsets=offsets,
        )

    def width(self, step: SampledStep, count: int) -> int:
        """Return the most tokens of a request when `count` drafts follow its text."""
        return min(int(step.flat.seq_lens.max()) + 1 + count, self.longest)


def shared_group(kv_specs: Sequence[KVCacheSpec]) -> int:
    """Return the KV group of the target model whose blocks a drafter uses: if possible, one that stores all tokens."""
    return next((group for group, spec in enumerate(kv_specs) if isinstance(spec, FullAttentionSpec)), 0)
