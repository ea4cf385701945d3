"""What is recorded of requests, and the log lines about them, for --enable-log-requests."""

import logging
from dataclasses import dataclass

from quire.messages.sampling_params import SamplingParams
from quire.metrics.logging import logger, printable

MAX_PARAMETERS = 2000  # characters of a request's sampling parameters in the log
_DEFAULTS = SamplingParams()


@dataclass(slots=True)
class RequestRecord:
    """A request of n sequences, until the last of them has ended."""

    n: int
    unfinished: int
    longest: int = 0  # tokens of its longest output


@dataclass(slots=True)
class SequenceRecord:
    """An unfinished sequence. Times are by time.monotonic(), and 0 for events that have not happened."""

    request: RequestRecord
    num_prompt_tokens: int
    max_tokens: int
    arrived_at: float
    adapter: str = ""
    core: int = 0  # the number of the core that runs it
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class RequestLog:
    """Logs each request when it arrives, with its parameters that are not vLLM's defaults, and each sequence when it
    ends.

    max_length: how many characters and how many token ids of a prompt are logged at most; None for all. Prompts are
    logged at level DEBUG only.
    """

    def __init__(self, enabled: bool, max_length: int | None = None) -> None:
        self.enabled, self.max_length = enabled, max_length

    def received(self, request_id: str, prompt: str | None, token_ids: list[int], params: SamplingParams) -> None:
        if not self.enabled:
            return
        given = {name: getattr(params, name) for name in params.__struct_fields__ if name != "output_kind"}
        unusual = [f"{name}={value!r}" for name, value in given.items() if value != getattr(_DEFAULTS, name)]
        parameters = printable(", ".join(unusual), MAX_PARAMETERS)
        logger.info("Request %s received: %d prompt tokens, %s", request_id, len(token_ids), parameters)
        if logger.isEnabledFor(logging.DEBUG):
            text = None if prompt is None else prompt[: self.max_length]
            logger.debug("Request %s: prompt %r, token ids %s", request_id, text, token_ids[: self.max_length])

    def ended(self, request_id: str, reason: str, sequence: SequenceRecord, now: float) -> None:
        if not self.enabled:
            return
        first = sequence.first_token_at - sequence.arrived_at
        logger.info(
            "Request %s ended (%s): %d prompt tokens (%d cached), %d generated; %s, %.2f s in all",
            request_id, reason, sequence.num_prompt_tokens, sequence.num_cached_tokens, sequence.num_tokens,
            f"first token after {first:.3f} s" if sequence.first_token_at else "no token", now - sequence.arrived_at,
        )  # fmt: skip
