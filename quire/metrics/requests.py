"""Log lines about requests, for --enable-log-requests."""

import logging

from quire.messages.sampling_params import SamplingParams
from quire.metrics.logging import logger, printable

MAX_PARAMETERS = 2000  # characters of a request's sampling parameters in the log
_DEFAULTS = SamplingParams()


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

    def ended(
        self,
        request_id: str,
        reason: str,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_tokens: int,
        first_token_seconds: float | None,
        seconds: float,
    ) -> None:
        if not self.enabled:
            return
        logger.info(
            "Request %s ended (%s): %d prompt tokens (%d cached), %d generated; %s, %.2f s in all",
            request_id, reason, num_prompt_tokens, num_cached_tokens, num_tokens,
            "no token" if first_token_seconds is None else f"first token after {first_token_seconds:.3f} s",
            seconds,
        )  # fmt: skip
