"""The running batch in fixed arrays, one row per request, and the flat batch that each step is made of."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.messages.step import NewRequest, SchedulerOutput
from quire.sampling.logits_processors import Ints, SamplingRows


@dataclass
class FlatBatch:
    """A step's "super sequence": the tokens of all its rows, one request after the other."""

    rows: Ints  # [requests]
    input_ids: Ints  # [tokens]
    positions: Ints  # [tokens]
    slot_mapping: Ints  # [groups, tokens]
    query_start_loc: npt.NDArray[np.int32]  # [requests + 1]
    seq_lens: npt.NDArray[np.int32]  # [requests]
    block_tables: npt.NDArray[np.int32]  # [groups, requests, blocks]
    samples: npt.NDArray[np.bool_]  # [requests]: whether the row samples at its last token


class InputBatch:
    """What the worker knows of its requests. Grows by the deltas of SchedulerOutput, and by what was sampled."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int, vocab_size: int
    ) -> None:
        rows = max_num_seqs
        self.block_size, self.vocab_size, self.max_model_len = block_size, vocab_size, max_model_len
        # One more than fits: the last token of a full row is sampled but never computed.
        self.token_ids = np.zeros((rows, max_model_len + 1), np.int32)
        self.block_tables = np.zeros((num_groups, rows, -(-max_model_len // block_size)), np.int32)
        self.num_tokens = np.zeros(rows, np.int64)
        self.num_computed = np.zeros(rows, np.int64)
        self.num_prompt = np.zeros(rows, np.int64)
        self.temperature = np.zeros(rows, np.float32)
        self.top_p = np.ones(rows, np.float32)
        self.top_k = np.zeros(rows, np.int64)
        self.min_p = np.zeros(rows, np.float32)
        self.seed = np.zeros(rows, np.int64)
        self.num_logprobs = np.full(rows, -1, np.int64)  # -1 where none are asked for
        self.num_prompt_logprobs = np.full(rows, -1, np.int64)  # the same, or where they have been reported

    def install(self, new: NewRequest) -> None:
        """Give a request its row. Raises ValueError if the model cannot run it."""
        row, params = new.row, new.sampling_params
        tokens = np.asarray(new.token_ids, np.int64)
        if len(tokens) > self.max_model_len:
            raise ValueError(f"{len(tokens)} tokens are more than max_model_len={self.max_model_len}")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            worst = int(tokens.min() if tokens.min() < 0 else tokens.max())
            raise ValueError(f"token id {worst} is outside the vocabulary of {self.vocab_size}")
        self.token_ids[row, : len(tokens)] = tokens
        self.num_tokens[row] = len(tokens)
        self.num_computed[row] = new.num_computed_tokens
        self.num_prompt[row] = new.num_prompt_tokens
        self.temperature[row] = 0.0 if params.greedy else params.temperature
        self.top_p[row] = params.top_p
        self.top_k[row] = params.top_k if params.top_k > 0 else self.vocab_size
        self.min_p[row] = params.min_p
        self.seed[row] = new.seed
        self.num_logprobs[row] = self._count(params.logprobs)
        # A preempted request that has output has had its prompt's logprobs reported with the first of it.
        resumed = len(tokens) > new.num_prompt_tokens
        self.num_prompt_logprobs[row] = -1 if resumed else self._count(params.prompt_logprobs)

    def _count(self, logprobs: int | None) -> int:
        return -1 if logprobs is None else self.vocab_size if logprobs == -1 else min(logprobs, self.vocab_size)

    def edit_block_tables(self, step: SchedulerOutput) -> None:
        edits = step.block_table_edits
        if edits.rows:
            self.block_tables[edits.groups, edits.rows, edits.indices] = edits.block_ids

    def flatten(self, step: SchedulerOutput) -> FlatBatch:
        """The step's tokens as one sequence, by whole-array operations; its rows' computed counts advance."""
        rows = np.asarray(step.rows, np.int64)
        counts = np.asarray(step.num_tokens, np.int64)
        start = self.num_computed[rows]
        seq_lens = start + counts
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        row_of_token = np.repeat(rows, counts)
        offset = np.repeat(query_start_loc[:-1] - start, counts)
        positions = np.arange(query_start_loc[-1]) - offset
        blocks, offsets = np.divmod(positions, self.block_size)
        slot_mapping = self.block_tables[:, row_of_token, blocks].astype(np.int64) * self.block_size + offsets
        width = -(-int(seq_lens.max()) // self.block_size)
        self.num_computed[rows] = seq_lens
        return FlatBatch(
            rows=rows,
            input_ids=self.token_ids[row_of_token, positions].astype(np.int64),
            positions=positions,
            slot_mapping=slot_mapping,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens.astype(np.int32),
            block_tables=self.block_tables[:, rows, :width],
            samples=seq_lens == self.num_tokens[rows],
        )

    def sampling_rows(self, rows: Ints) -> SamplingRows:
        """These rows as logits processors see them: the logits of rows[i] are those of place i."""
        num_prompt, num_tokens = self.num_prompt[rows], self.num_tokens[rows]
        return SamplingRows(np.arange(len(rows)), rows, num_prompt, num_tokens, self.token_ids)

    def append(self, rows: Ints, tokens: Ints) -> None:
        """A sampled token for each of `rows`."""
        self.token_ids[rows, self.num_tokens[rows]] = tokens
        self.num_tokens[rows] += 1
