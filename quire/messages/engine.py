"""Between the client side (processor, output processor) and the engine core."""

from enum import StrEnum

import msgspec

from quire.messages.sampling_params import SamplingParams
from quire.messages.step import Logprobs


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # the client went away
    ERROR = "error"  # this request could not be run; stop_reason says why


class RequestError(Exception):
    """One request cannot be run. Raised before its step is launched, it fails that request alone."""

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(f"request {request_id}: {reason}")
        self.request_id = request_id
        self.reason = reason


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A validated, tokenized request. Lengths, ranges and token ids were checked by the processor.

    seed: the resolved seed of this one sequence (n > 1 is fanned out before). arrival_time: seconds, orders the queue.
    max_tokens: resolved, so that prompt and output fit into max_model_len. eos_token_id: None to ignore it.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    max_tokens: int
    eos_token_id: int | None = None
    stop_token_ids: list[int] = []
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    bad_words: list[list[int]] = []  # token ids of each way to write one


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step brought one request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token, or what went wrong
    num_cached_tokens: int = 0
    logprobs: Logprobs | None = None  # of new_token_ids, at least
    prompt_logprobs: Logprobs | None = None  # once: of all prompt tokens but the first
