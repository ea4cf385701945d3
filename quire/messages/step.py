"""A step is data: what the scheduler decided, and what the model runner answered.

Only deltas travel. A request is sent whole when it is given a row; later steps name it by its row alone. A recorded
list of SchedulerOutput replays a run.
"""

import msgspec

from quire.messages.pooling_params import PoolingParams
from quire.messages.sampling_params import SamplingParams


class NewRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A request that enters the batch (for the first time, or again after a preemption), whole.

    num_computed_tokens of token_ids have their keys and values in the cache already (a prefix-cache hit).
    """

    request_id: str
    row: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling_params: SamplingParams | None
    seed: int
    stop_token_ids: list[int] = []  # all tokens that would end it: held down until min_tokens is reached
    bad_words: list[list[int]] = []  # token ids of each way to write one
    pooling_params: PoolingParams | None = None

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of a request that samples."""
        assert self.sampling_params is not None
        return self.sampling_params


class BlockTableEdits(msgspec.Struct, array_like=True):
    """Assignments block_tables[group][row, index] = block_id, as four parallel lists."""

    groups: list[int] = msgspec.field(default_factory=list)
    rows: list[int] = msgspec.field(default_factory=list)
    indices: list[int] = msgspec.field(default_factory=list)
    block_ids: list[int] = msgspec.field(default_factory=list)


class SchedulerOutput(msgspec.Struct, array_like=True):
    """One step: row rows[i] computes its next num_tokens[i] tokens. A step may have no rows at all.

    A row samples when, after this step, the keys and values of all its tokens (those sampled by earlier steps
    included) are computed; scheduler and model runner both know that without saying it. It samples after its last
    1 + num_draft_tokens[i] tokens: each of these places gives a token.

    epoch: once a request of a step has been refused, the worker skips all later steps of the same epoch.
    num_draft_tokens: how many of a row's last tokens are guesses, by place in the step; an empty list says none.
    """

    step_id: int
    new_requests: list[NewRequest] = msgspec.field(default_factory=list)
    rows: list[int] = msgspec.field(default_factory=list)
    num_tokens: list[int] = msgspec.field(default_factory=list)
    block_table_edits: BlockTableEdits = msgspec.field(default_factory=BlockTableEdits)
    epoch: int = 0
    num_draft_tokens: list[int] = msgspec.field(default_factory=list)


class TokenMasks(msgspec.Struct, array_like=True):
    """Which tokens may be drawn at some places of a step; at its other places, all may.

    places: indices into the places of the step, in the order of its rows, and of the tokens within a row.
    bits: int32 [places, ceil(vocab_size / 32)]; token t may be drawn if bit t % 32 of word t // 32 is set.
    """

    places: list[int]
    bits: bytes


class Logprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at consecutive places of a sequence, packed. At each place, the token that is there comes
    first, then the width - 1 likeliest ones, best first.
    """

    width: int
    token_ids: bytes  # int32 [places, width]
    logprobs: bytes  # float32 [places, width]
    ranks: bytes  # int32 [places]: of the token that is there; 1 is the likeliest


class ModelRunnerOutput(msgspec.Struct, array_like=True):
    """The tokens that a step sampled: one list a row, in the step's order, with one token for each of the row's places
    in the order of the text; empty where the row did not sample.

    logprobs: of what was sampled, by the row's place in the step; only of rows that asked.
    prompt_logprobs: of a whole prompt but its first token, when its row samples for the first time.
    refusals: why requests cannot be run, by their place in the step. Such a step was not run at all.
    was_skipped: the step was not run, because of its own refusals or those of an earlier step of its epoch.
    """

    step_id: int
    sampled_token_ids: list[list[int]] = msgspec.field(default_factory=list)
    logprobs: dict[int, Logprobs] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, Logprobs] = msgspec.field(default_factory=dict)
    refusals: dict[int, str] = msgspec.field(default_factory=dict)
    was_skipped: bool = False
