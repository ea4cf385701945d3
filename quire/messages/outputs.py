"""The results of LLM.generate: vLLM's RequestOutput and CompletionOutput."""

from dataclasses import dataclass, field
from typing import Any

from quire.messages.step import Pooled


@dataclass(slots=True)
class Logprob:
    """The log-probability of a token at a place. rank: 1 is the likeliest. decoded_token: the text that it adds."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class SpecDecodeMetrics:
    """The draft statistics of one completion: vLLM's metrics.speculative_decoding.

    num_spec_tokens: the maximum number of drafts per verification. counts: number of drafts -> list of the number of
    verifications, indexed by the number of accepted drafts. per_step: (drafts, accepted) of each verification, None
    unless requested.
    """

    num_spec_tokens: int
    counts: dict[int, list[int]] = field(default_factory=dict)
    per_step: list[tuple[int, int]] | None = None

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        self.counts.setdefault(num_drafts, [0] * (num_drafts + 1))[num_accepted] += 1
        if self.per_step is not None:
            self.per_step.append((num_drafts, num_accepted))

    @property
    def num_draft_tokens(self) -> int:
        return sum(length * sum(row) for length, row in self.counts.items())

    @property
    def num_accepted_tokens(self) -> int:
        return sum(accepted * times for row in self.counts.values() for accepted, times in enumerate(row))

    def to_dict(self) -> dict[str, Any]:
        histogram = [0] * (self.num_spec_tokens + 1)
        for row in self.counts.values():
            for accepted, times in enumerate(row):
                histogram[accepted] += times
        steps = sum(histogram)
        drafted = self.num_draft_tokens
        accepted = self.num_accepted_tokens
        fields = {
            "mean_acceptance_length": 1 + accepted / max(steps, 1),
            "draft_acceptance_rate": accepted / max(drafted, 1),
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": {str(length): row for length, row in sorted(self.counts.items())},
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": self.num_spec_tokens,
        }
        if self.per_step is None:
            return fields
        return {
            **fields,
            "per_step_accepted": [step_accepted for _, step_accepted in self.per_step],
            "per_step_drafted": [step_drafted for step_drafted, _ in self.per_step],
        }


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    cumulative_logprob, logprobs: None unless the request asked for logprobs. logprobs has {token id: Logprob} for each
    token of the completion; that token itself is first.

    finish_reason: "stop", "length", "repetition", "abort", "error", "bad_request", "overloaded", or None while it runs.
    stop_reason: the stop string or the stop token id that ended the completion, None for end-of-sequence; with "error",
    "bad_request" and "overloaded", the reason. A bad request is a request whose error only the engine can detect, such
    as an impossible grammar. With "overloaded", other requests used up the time or memory that it needs.

    spec_decode_metrics: draft statistics so far; None without speculation. pooled: the result of a pooling request.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    spec_decode_metrics: SpecDecodeMetrics | None = None
    pooled: Pooled | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestStateStats:
    """The times of a request's events, in seconds, and the number of its tokens.

    arrival_time: by the wall clock. The other times are by time.monotonic(), and 0 for events that have not happened:
    when the request was queued, when it was first scheduled, and when its first and its latest token arrived.
    first_token_latency: from arrival to the first token. num_generation_tokens: of all n completions.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass
class RequestOutput:
    """A prompt and its completions so far.

    num_cached_tokens: prompt tokens that were found in the prefix cache. prompt_logprobs: if the request asked for
    them, None for the first token and {token id: Logprob} for each later one. kv_transfer_params: if this engine was
    asked to offer the prompt's blocks, the parameters for the engine that continues the request. encoder_prompt,
    encoder_prompt_token_ids: the encoder's prompt of an encoder-decoder model; the other fields have the decoder's.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestStateStats | None = None
    kv_transfer_params: dict[str, Any] | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None


@dataclass(slots=True)
class PoolingOutput:
    """data: a tensor of float32, [out], or [tokens, out] if each token has a vector."""

    data: Any


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """probs: one for each label of the model."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass
class PoolingRequestOutput:
    """The result of a prompt, with vLLM's names. outputs: a PoolingOutput, or the output type of the called method."""

    request_id: str
    outputs: PoolingOutput | EmbeddingOutput | ClassificationOutput | ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
