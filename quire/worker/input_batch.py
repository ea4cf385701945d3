"""The running batch in fixed arrays, one row per request, and the flat batch of each step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.kv.specs import CrossAttentionSpec, KVCacheSpec
from quire.layers.step_inputs import Array, StepSize
from quire.layers.step_media import StepMedia
from quire.messages.sampling_params import SamplingParams
from quire.messages.step import NewRequest, SchedulerOutput
from quire.sampling.batch_state import BatchState
from quire.sampling.logits_processors import Ints, SamplingPlaces


@dataclass(frozen=True)
class Spans:
    """Consecutive tokens of several rows, one row after the other."""

    rows: Ints  # [rows]
    token_rows: Ints  # [tokens]
    positions: Ints  # [tokens]
    query_start_loc: npt.NDArray[np.int32]  # [rows + 1]
    seq_lens: Ints  # [rows]: the end of each span

    @classmethod
    def of(cls, rows: Ints, starts: Ints, counts: Ints) -> Self:
        """Create spans of counts[i] tokens of rows[i], from the position starts[i] on."""
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        query_start_loc[1:] = counts.cumsum()
        positions = np.arange(query_start_loc[-1]) - np.repeat(query_start_loc[:-1] - starts, counts)
        return cls(rows, np.repeat(rows, counts), positions, query_start_loc, starts + counts)


@dataclass(frozen=True)
class FlatBatch:
    """The tokens that a step computes, request after request, and the places at which it samples.

    On an asynchronous device, positions and lengths are upper bounds; the device computes the exact values from its own
    counters.
    """

    rows: Ints  # [requests]
    token_rows: Ints  # [tokens]
    positions: Ints  # [tokens]
    query_start_loc: npt.NDArray[np.int32]  # [requests + 1]
    seq_lens: npt.NDArray[np.int32]  # [requests]
    num_places: Ints  # [requests]
    place_start_loc: Ints  # [requests + 1]: request i samples at places place_start_loc[i] up to place_start_loc[i + 1]
    place_rows: Ints  # [places]
    place_tokens: Ints  # [places]: index in the flat batch of the token after which the place samples
    place_positions: Ints  # [places]: position of that token in its sequence
    tokens_per_request: int = 0  # see StepSize
    adapted: bool = False  # see StepSize
    has_drafts: bool = False  # whether a request may sample at several places
    extra_inputs: dict[str, Array] = field(default_factory=dict)  # further inputs that StepInputs declares, by name
    media: StepMedia | None = None

    @property
    def size(self) -> StepSize:
        return StepSize(len(self.positions), len(self.rows), self.tokens_per_request, self.adapted)

    @property
    def inputs(self) -> dict[str, Array]:
        """Return the inputs declared by StepInputs that the host knows."""
        known: dict[str, Array] = {"positions": self.positions, "query_start_loc": self.query_start_loc}
        return {**known, "seq_lens": self.seq_lens, **self.extra_inputs}

    @property
    def longest_prompt(self) -> int:
        """Return the length of the longest request if the step computes all tokens of each request, else 0. Also 0 if
        each request has one token."""
        if self.tokens_per_request == 1:
            return 0
        counts = np.diff(self.query_start_loc)
        return int(counts.max(initial=0)) if np.array_equal(counts, self.seq_lens) else 0


class InputBatch:
    """The worker's view of the requests that have a row. SchedulerOutput and the sampled tokens update it."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        kv_specs: Sequence[KVCacheSpec],
        vocab_size: int,
        takes_adapters: bool = False,
        has_sections: bool = False,
    ) -> None:
        """kv_specs: one for each KV group. takes_adapters: whether requests may have low-rank adapters. has_sections:
        see DecoderSpec."""
        rows = max_num_seqs
        self.takes_adapters = takes_adapters
        self.has_sections = has_sections
        self.kv_specs = kv_specs
        self.cross_groups = [group for group, spec in enumerate(kv_specs) if isinstance(spec, CrossAttentionSpec)]
        options = {"adapters": takes_adapters, "rotary_offsets": has_sections, "crossed": bool(self.cross_groups)}
        self.optional_inputs = [name for name, is_given in options.items() if is_given]  # see StepInputs
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        # One column more than max_model_len: the last token of a full row is sampled but never computed.
        self.token_ids = np.zeros((rows, max_model_len + 1), np.int32)
        # Tables of cross-attention have this length from the beginning.
        self._least_width = max((spec.table_length(0, block_size) for spec in kv_specs), default=0)
        width = max(self._least_width, -(-max_model_len // block_size))
        self.block_tables = np.zeros((len(kv_specs), rows, width), np.int32)
        self.num_tokens = np.zeros(rows, np.int64)
        self.num_unread = np.zeros(rows, np.int64)  # tokens among them that are being sampled
        self.num_computed = np.zeros(rows, np.int64)
        self.num_prompt = np.zeros(rows, np.int64)
        self.temperature = np.zeros(rows, np.float32)
        self.top_p = np.ones(rows, np.float32)
        self.top_k = np.zeros(rows, np.int64)
        self.min_p = np.zeros(rows, np.float32)
        self.seed = np.zeros(rows, np.int64)
        self.has_seed = np.zeros(rows, bool)  # whether the request itself gave it
        self.num_logprobs = np.full(rows, -1, np.int64)  # -1 where none are requested
        self.logprob_token_ids: dict[int, list[int]] = {}  # by row, for requests that name the tokens
        self.num_prompt_logprobs = np.full(rows, -1, np.int64)  # -1 where none are requested, or once reported
        self.adapters = np.full(rows, -1, np.int64)  # the slot of the row's adapter, -1 for none

    def install(self, new: NewRequest) -> None:
        """Fill a request's row. Raises ValueError if the model cannot run the request."""
        row = new.row
        tokens = np.asarray(new.token_ids, np.int64)
        if len(tokens) > self.max_model_len:
            raise ValueError(f"{len(tokens)} tokens are more than max_model_len={self.max_model_len}")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            worst = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise ValueError(f"token id {worst} is out of vocabulary; the model has {self.vocab_size} tokens")
        self.adapters[row] = -1 if new.adapter is None else new.adapter.slot
        self.token_ids[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)
        self.num_unread[row] = 0
        self.num_computed[row] = new.num_computed_tokens
        self.num_prompt[row] = new.num_prompt_tokens
        if new.sampling_params is not None:
            self._install_sampling(new, new.sampling_params)

    def _install_sampling(self, new: NewRequest, params: SamplingParams) -> None:
        row = new.row
        self.temperature[row] = 0.0 if params.greedy else params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = params.top_k if params.top_k > 0 else self.vocab_size
        self.min_p[row] = params.min_p
        self.seed[row], self.has_seed[row] = new.seed, params.seed is not None
        self.num_logprobs[row] = self._count(params.logprobs)
        self.logprob_token_ids.pop(row, None)
        if params.logprob_token_ids is not None:
            self.logprob_token_ids[row] = named = list(dict.fromkeys(params.logprob_token_ids))
            self.num_logprobs[row] = len(named)
        # Prompt logprobs are reported with the first output token, so a resumed request with output has already
        # received them.
        resumed = len(new.token_ids) > new.num_prompt_tokens
        self.num_prompt_logprobs[row] = -1 if resumed else self._count(params.prompt_logprobs)

    def _count(self, logprobs: int | None) -> int:
        if logprobs is None:
            return -1
        return self.vocab_size if logprobs == -1 else min(logprobs, self.vocab_size)

    def add_known_tokens(self, step: SchedulerOutput) -> None:
        edits = step.known_tokens
        drafts = step.draft_tokens
        if edits.rows:
            self.token_ids[edits.rows, edits.positions] = edits.token_ids
            self.num_tokens[edits.rows] = np.asarray(edits.positions) + 1  # the last position of a row wins
        if drafts.rows:
            self.token_ids[drafts.rows, drafts.positions] = drafts.token_ids

    def edit_block_tables(self, step: SchedulerOutput) -> None:
        edits = step.block_table_edits
        if edits.rows:
            self.block_tables[edits.groups, edits.rows, edits.indices] = edits.block_ids

    def flatten(self, step: SchedulerOutput) -> FlatBatch:
        """Concatenate the step's tokens with whole-array operations, and advance `num_computed` of its rows."""
        rows = np.asarray(step.rows, np.int64)
        counts = np.asarray(step.num_tokens, np.int64)
        for index, _, again in step.compressions:
            self.num_computed[step.rows[index]] -= again
        spans = Spans.of(rows, self.num_computed[rows], counts)
        query_start_loc = spans.query_start_loc
        seq_lens = spans.seq_lens
        positions = spans.positions
        self.num_computed[rows] = seq_lens
        drafts: npt.NDArray[Any] | int = 0
        tokens_per_request = 1
        if step.num_draft_tokens:
            drafts = np.asarray(step.num_draft_tokens, np.int64)
            most = max(step.num_draft_tokens)
            fewest = min(step.num_draft_tokens)
            tokens_per_request = 1 + most if most == fewest else 0
        num_places = (seq_lens == self.num_tokens[rows] + drafts) * (1 + drafts)
        place_start_loc = np.zeros(len(rows) + 1, np.int64)
        place_start_loc[1:] = num_places.cumsum()
        # A request samples after its last tokens.
        place_tokens = np.repeat(query_start_loc[1:] - place_start_loc[1:], num_places) + np.arange(place_start_loc[-1])
        return FlatBatch(
            rows=rows,
            token_rows=spans.token_rows,
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens.astype(np.int32),
            num_places=num_places,
            place_start_loc=place_start_loc,
            place_rows=spans.token_rows[place_tokens],
            place_tokens=place_tokens,
            place_positions=positions[place_tokens],
            tokens_per_request=tokens_per_request if (counts == tokens_per_request).all() else 0,
            has_drafts=bool(step.num_draft_tokens),
            adapted=self.takes_adapters and bool((self.adapters[rows] >= 0).any()),
            extra_inputs={"adapters": self.adapters[spans.token_rows]} if self.takes_adapters else {},
        )

    def gather(self, flat: FlatBatch) -> dict[str, Array]:
        """Return the inputs that depend on tokens and block tables. On an asynchronous device, the op flat_batch
        computes them instead. Block tables are as wide as the longest request needs."""
        width = max(-(-int(flat.seq_lens.max(initial=1)) // self.block_size), self._least_width)
        return {
            "input_ids": self.token_ids[flat.token_rows, flat.positions].astype(np.int64),
            "slot_mapping": self._slots(flat),
            "block_tables": self.block_tables[:, flat.rows, :width],
        }

    def gather_shared(self, spans: Spans, group: int, copies: int) -> dict[str, Array]:
        """Return the inputs of a forward over these tokens, for `copies` groups that use the blocks of one group."""
        width = -(-int(spans.seq_lens.max(initial=1)) // self.block_size)
        slots = self._slots_of(group, spans.token_rows, spans.positions)
        return {
            "input_ids": self.token_ids[spans.token_rows, spans.positions].astype(np.int64),
            "positions": spans.positions,
            "query_start_loc": spans.query_start_loc,
            "seq_lens": spans.seq_lens.astype(np.int32),
            "slot_mapping": np.repeat(slots[None], copies, 0),
            "block_tables": np.repeat(self.block_tables[None, group, spans.rows, :width], copies, 0),
        }

    def _slots(self, flat: FlatBatch) -> Array:
        """Return the slots [groups, tokens], computed by each group's spec."""
        slots = np.empty((len(self.kv_specs), len(flat.positions)), np.int64)
        for group in range(len(self.kv_specs)):
            slots[group] = self._slots_of(group, flat.token_rows, flat.positions)
        return slots

    def _slots_of(self, group: int, token_rows: Ints, positions: Ints) -> Array:
        return self.kv_specs[group].slots(self.block_tables[group], token_rows, positions, self.block_size)

    def sampling(self, rows: Ints, positions: Ints) -> dict[str, Array]:
        """Return the sampling parameters of places, by their names in SamplingBatch. Parameters that no request uses
        are omitted. rows, positions: [places], of the tokens to sample."""
        temperature = self.temperature[rows]
        random = temperature.nonzero()[0]
        arrays: dict[str, Array] = {}
        if len(random):
            if len(random) < len(rows):
                arrays["random"], rows, positions = random, rows[random], positions[random]
                temperature = temperature[random]
            top_k = self.top_k[rows]
            top_p = self.top_p[rows]
            min_p = self.min_p[rows]
            arrays["temperature"], arrays["seeds"] = temperature, self.seed[rows]
            arrays["output_positions"] = positions - self.num_prompt[rows]
            arrays |= {"top_k": top_k} if (top_k < self.vocab_size).any() else {}
            arrays |= {"top_p": top_p} if (top_p < 1).any() else {}
            arrays |= {"min_p": min_p} if min_p.any() else {}
        return arrays

    def named_tokens(self, rows: Ints) -> Ints | None:
        """Return [rows, most]: the token ids whose logprobs each row requests, padded with -1. None if no row requests
        any."""
        named = [self.logprob_token_ids.get(row, []) for row in rows.tolist()] if self.logprob_token_ids else []
        if not any(named):
            return None
        token_ids = np.full((len(rows), max(map(len, named))), -1, np.int64)
        for place, of_row in enumerate(named):
            token_ids[place, : len(of_row)] = of_row
        return token_ids

    def sampling_places(self, flat: FlatBatch, state: BatchState, positions: Tensor) -> SamplingPlaces:
        """Return the places of a step for logits processors; the logits of place i are logits[i].

        positions: of the places, on the device of `state`."""
        rows = flat.place_rows
        columns = np.arange(len(rows)), rows, self.num_prompt[rows], flat.place_positions + 1
        return SamplingPlaces(*columns, self.token_ids, state, positions + 1)

    def expect(self, flat: FlatBatch) -> None:
        """Count the tokens that are being sampled at the step's places: at most one at each. `fill` stores them."""
        self.num_tokens[flat.rows] += flat.num_places
        self.num_unread[flat.rows] += flat.num_places

    def fill(self, flat: FlatBatch, tokens: Ints, kept: Ints | None = None) -> None:
        """Store the tokens [places] that were sampled at the step's places. kept: [requests], how many of each
        request's tokens become part of its text, as computed by the op count_kept; None for all."""
        if kept is None:  # then a row has at most one place
            rows = flat.place_rows
            self.token_ids[rows, self.num_tokens[rows] - self.num_unread[rows]] = tokens
            self.num_unread[rows] -= 1
            return
        rows = flat.rows
        places = flat.num_places
        start = self.num_tokens[rows] - self.num_unread[rows]
        self.num_unread[rows] -= places
        self.num_tokens[rows] -= places - kept
        self.num_computed[rows] -= places - kept
        offsets = np.repeat(start - flat.place_start_loc[:-1], places) + np.arange(len(tokens))
        self.token_ids[flat.place_rows, offsets] = tokens
