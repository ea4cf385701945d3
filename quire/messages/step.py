"""A step as data: the scheduler's decisions, and the model runner's results.

The messages contain only changes. A complete request is sent when it gets a row; later steps refer to the row. A run
can be replayed from its recorded SchedulerOutputs.
"""

import msgspec

from quire.messages.media import MediaItem, MediaPlace
from quire.messages.pooling_params import PoolingParams
from quire.messages.sampling_params import SamplingParams


class AdapterPlace(msgspec.Struct, array_like=True, frozen=True):
    """The required place of a request's adapter: the loaded adapter `key` in the slot `slot`. All requests in submitted
    steps that use the slot have the same adapter."""

    slot: int
    key: str


class NewRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A complete request that enters the batch, for the first time or again after a preemption.

    num_computed_tokens: the first tokens of token_ids whose keys and values are already in the cache (a prefix-cache
    hit). rotary_positions: int32 [axes, prompt tokens], if they differ from the token positions; see RotaryEmbedding.
    """

    request_id: str
    row: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling_params: SamplingParams | None
    seed: int
    stop_token_ids: list[int] = []  # all tokens that would end the request: not sampled before min_tokens
    bad_words: list[list[int]] = []  # token ids of each form of each bad word
    pooling_params: PoolingParams | None = None
    adapter: AdapterPlace | None = None
    media: list[MediaPlace] = []
    rotary_positions: bytes = b""

    @property
    def sampling(self) -> SamplingParams:
        """Return the sampling parameters of a request that samples."""
        assert self.sampling_params is not None
        return self.sampling_params


class BlockTableEdits(msgspec.Struct, array_like=True):
    """Assignments `block_tables[group][row, index] = block_id`, as four parallel lists."""

    groups: list[int] = msgspec.field(default_factory=list)
    rows: list[int] = msgspec.field(default_factory=list)
    indices: list[int] = msgspec.field(default_factory=list)
    block_ids: list[int] = msgspec.field(default_factory=list)


class TokenEdits(msgspec.Struct, array_like=True):
    """Assignments `token_ids[row, position] = token_id`, as three parallel lists. The positions of a row are in their
    order."""

    rows: list[int] = msgspec.field(default_factory=list)
    positions: list[int] = msgspec.field(default_factory=list)
    token_ids: list[int] = msgspec.field(default_factory=list)


class SchedulerOutput(msgspec.Struct, array_like=True):
    """One step: row rows[i] computes its next num_tokens[i] tokens. A step may have no rows at all.

    A row samples if the keys and values of all its tokens, including those sampled by earlier steps, are computed after
    this step. Scheduler and model runner both derive that from their own counts. The row then samples one token at each
    of its places, which follow its last 1 + num_draft_tokens[i] tokens.

    epoch: once a request of a step was refused, the worker skips all later steps of the same epoch.
    num_draft_tokens: how many of the last tokens of rows[i] are drafts; an empty list if no row has any.
    draft_tokens: these drafts.
    num_next_drafts: how many drafts the device's drafter generates for rows[i] after this step; an empty list if no row
        has any. The row has cache slots for this many tokens after those of the step.
    compressions: (i, blocks, again) for each rows[i] whose text up to the end of this step is compressed: its KV heads
        keep this many full blocks each on average. These become its first blocks, followed by the last one if that is
        not full. The first `again` of the row's tokens have been computed before.
    known_tokens: tokens of this step's rows that a grammar forced instead of sampling. Such a row has no earlier step
        in flight.
    encode: media to encode before the step.
    forget: keys to drop from the embedding cache before encoding. forgets_all: drop all keys first.
    """

    step_id: int
    new_requests: list[NewRequest] = msgspec.field(default_factory=list)
    rows: list[int] = msgspec.field(default_factory=list)
    num_tokens: list[int] = msgspec.field(default_factory=list)
    block_table_edits: BlockTableEdits = msgspec.field(default_factory=BlockTableEdits)
    epoch: int = 0
    num_draft_tokens: list[int] = msgspec.field(default_factory=list)
    known_tokens: TokenEdits = msgspec.field(default_factory=TokenEdits)
    draft_tokens: TokenEdits = msgspec.field(default_factory=TokenEdits)
    num_next_drafts: list[int] = msgspec.field(default_factory=list)
    compressions: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    encode: list[MediaItem] = msgspec.field(default_factory=list)
    forget: list[str] = msgspec.field(default_factory=list)
    forgets_all: bool = False


class StepCosts(msgspec.Struct, array_like=True, frozen=True):
    """How many seconds steps and drafts take. Measured at start if the number of drafts depends on it.

    steps: by number of tokens. first_draft, next_draft: by number of requests, for each request's first draft and for
    each further one.
    """

    steps: dict[int, float] = {}
    first_draft: dict[int, float] = {}
    next_draft: dict[int, float] = {}


class TokenMasks(msgspec.Struct, array_like=True):
    """Which tokens may be drawn at some places of a step. At its other places, all tokens may be drawn.

    places: indices into the places of the step, in the order of its rows, and of the tokens within a row.
    bits: int32 [places, ceil(vocab_size / 32)]; token t may be drawn if bit t % 32 of word t // 32 is set.
    """

    places: list[int]
    bits: memoryview  # valid until the step has been sampled


class Logprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at consecutive places of a sequence, packed. At each place, the sequence's own token is first;
    the width - 1 likeliest tokens follow, best first.
    """

    width: int
    token_ids: bytes  # int32 [places, width]
    logprobs: bytes  # float32 [places, width]
    ranks: bytes  # int32 [places]: the rank of the sequence's own token; 1 is the likeliest


class Pooled(msgspec.Struct, array_like=True):
    """The result of pooling a text: an embedding or scores, [out], or one per token, [tokens, out]."""

    shape: list[int]
    data: bytes  # float32


class ModelRunnerOutput(msgspec.Struct, array_like=True):
    """The results of a step. The dicts are keyed by i, the index of a row in the step's `rows`.

    sampled_token_ids: for each row, in the step's order, the tokens that follow its text: one without drafts, otherwise
        the accepted drafts and one more. The list of a row that did not sample is empty.
    logprobs: of the sampled tokens, for the rows that requested them.
    prompt_logprobs: of a whole prompt except its first token, when its row samples for the first time.
    refusals: why a request cannot be run, or why its results cannot be used. The request fails.
    was_skipped: the step was not run, because of its own refusals or those of an earlier step of its epoch.
    draft_token_ids: for each row, the drafts after its sampled tokens; an empty list if the step requested none.
    pooled: the results of pooling rows, which end with this step.
    """

    step_id: int
    sampled_token_ids: list[list[int]] = msgspec.field(default_factory=list)
    logprobs: dict[int, Logprobs] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, Logprobs] = msgspec.field(default_factory=dict)
    refusals: dict[int, str] = msgspec.field(default_factory=dict)
    was_skipped: bool = False
    draft_token_ids: list[list[int]] = msgspec.field(default_factory=list)
    pooled: dict[int, Pooled] = msgspec.field(default_factory=dict)
