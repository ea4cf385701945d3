"""The token usage of a request, and the events of a stream, which may contain it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from quire.messages.outputs import RequestOutput, SpecDecodeMetrics
from quire.server.responses import Usage

if TYPE_CHECKING:
    from quire.server.generation import Call


class Meter:
    """Counts a request's tokens and, with `with_drafts`, its accepted drafts."""

    def __init__(self, with_drafts: bool) -> None:
        self._with_drafts = with_drafts
        self._drafts: dict[tuple[str, int], SpecDecodeMetrics] = {}  # by request id and index of the completion
        self._prompts: dict[str, tuple[int, int]] = {}  # request id -> (tokens, cached tokens)
        self.completion_tokens = 0
        self.reasoning_tokens = 0  # of the output, by tokenizing the thinking's text

    def add(self, output: RequestOutput) -> None:
        """Count an output, or the new part of one."""
        tokens = len(output.prompt_token_ids) + len(output.encoder_prompt_token_ids or ())
        self._prompts[output.request_id] = tokens, output.num_cached_tokens
        self.completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if self._with_drafts:
            for completion in output.outputs:
                if completion.spec_decode_metrics is not None:
                    self._drafts[output.request_id, completion.index] = completion.spec_decode_metrics

    @property
    def metrics(self) -> dict[str, Any] | None:
        """Return vLLM's object `metrics`, which only a response with one completion has."""
        drafts = list(self._drafts.values())
        return {"speculative_decoding": drafts[0].to_dict()} if len(drafts) == 1 else None

    @property
    def usage_at_start(self) -> Usage:
        """Return the usage before the first output token."""
        usage = self.usage
        usage.pop("completion_tokens_details", None)
        return {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}

    @property
    def usage(self) -> Usage:
        prompt_tokens = sum(tokens for tokens, _ in self._prompts.values())
        usage: Usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompts.values())},
        }
        details: dict[str, int] = {}
        if self.reasoning_tokens:
            details["reasoning_tokens"] = min(self.reasoning_tokens, self.completion_tokens)
        if self._drafts:
            accepted = sum(drafts.num_accepted_tokens for drafts in self._drafts.values())
            drafted = sum(drafts.num_draft_tokens for drafts in self._drafts.values())
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        if details:
            usage["completion_tokens_details"] = details
        return usage


class Chunks:
    """Server-sent events of one stream."""

    def __init__(self, call: "Call", head: Mapping[str, Any]) -> None:
        """head: the fields that all events share."""
        self._head = b"data: " + msgspec.json.encode(head)[:-1]
        options = call.body.stream_options
        self._with_usage = call.body.include_usage or call.server.config.enable_force_include_usage
        self._continuous = self._with_usage and options is not None and bool(options.continuous_usage_stats)

    def event(self, choice: Mapping[str, Any], meter: Meter, *, at_start: bool = False, **extra: Any) -> bytes:
        """at_start: the event precedes the first output token."""
        usage = b""
        if self._continuous:
            usage = b',"usage":' + msgspec.json.encode(meter.usage_at_start if at_start else meter.usage)
        elif self._with_usage:
            usage = b',"usage":null'
        fields = b"," + msgspec.json.encode(extra)[1:-1] if extra else b""
        return b"".join((self._head, b',"choices":[', msgspec.json.encode(choice), b"]", usage, fields, b"}\n\n"))

    def last(self, meter: Meter) -> bytes:
        """Return the event with the total usage, or nothing if the request did not ask for it."""
        if not self._with_usage:
            return b""
        values = meter.metrics
        metrics = b"" if values is None else b',"metrics":' + msgspec.json.encode(values)
        return b"".join((self._head, b',"choices":[],"usage":', msgspec.json.encode(meter.usage), metrics, b"}\n\n"))
