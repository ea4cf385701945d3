"""Traces: the attributes of request spans, following OpenTelemetry's semantic conventions for HTTP and generative AI.

vLLM's attribute names are added. Spans contain no text of a prompt or an output.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.config.engine import ConfigError
from quire.platform.extras import install_command

if TYPE_CHECKING:
    from quire.engine.processor import ProcessedRequest
    from quire.messages.outputs import RequestOutput
    from quire.server.errors import ApiError
    from quire.server.request_log import Summary
    from quire.server.spans import ServerSpan, Tracing

MOST_PROMPTS = 16  # per request that get spans for their times
MOST_CHARACTERS = 64  # of a tool's name and a call id, which the model may generate
_OPERATIONS = {
    "/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/messages": "chat", "/api/chat": "chat",
    "/v1/completions": "text_completion", "/api/generate": "text_completion",
    "/inference/v1/generate": "text_completion", "/v1/embeddings": "embeddings", "/api/embed": "embeddings",
    "/pooling": "embeddings", "/classify": "classify", "/score": "score", "/v1/score": "score", "/rerank": "rerank",
    "/v1/rerank": "rerank", "/v2/rerank": "rerank",
}  # fmt: skip


def begin_tracing(
    endpoint: str | None, service: str, ignored: Callable[[str], bool] = lambda path: False
) -> "Tracing | None":
    """Return a Tracing, or None without an endpoint; see there for the arguments. Raises ConfigError."""
    if endpoint is None:
        return None
    try:
        from quire.server.spans import Tracing

        return Tracing(endpoint, service, ignored)
    except ImportError as error:
        message = f"otlp_traces_endpoint needs OpenTelemetry ({error.name} is missing): {install_command('otel')}"
        raise ConfigError(message) from error


def route_of(path: str) -> str | None:
    """Return the path if it is a known operation of a model, since there may be any number of other paths."""
    return path if path in _OPERATIONS else None


class RequestTrace:
    """The recorded span of a request."""

    def __init__(self, span: "ServerSpan", route: str | None, request_id: str) -> None:
        self._span = span
        operation = _OPERATIONS.get(route or "")
        provider = None if operation is None else "quire"
        span.set(
            {"gen_ai.operation.name": operation, "gen_ai.provider.name": provider, "gen_ai.request.id": request_id}
        )

    def called(self, name: str, call_id: str, index: int) -> None:
        """Record that the output with this index calls a tool. Its arguments are not known yet."""
        self._span.add_event(
            "gen_ai.tool.call",
            {
                "gen_ai.tool.name": name[:MOST_CHARACTERS],
                "gen_ai.tool.call.id": call_id[:MOST_CHARACTERS],
                "gen_ai.tool.type": "function",
                "gen_ai.choice.index": index,
            },
        )

    def ran(self, requests: "Sequence[ProcessedRequest]", outputs: "Sequence[RequestOutput]", began: float) -> None:
        """Record the results of a request that has ended or was cut short. began: its arrival, by time.monotonic()."""
        if not outputs:
            return
        pools = requests[0].core_requests[0].pooling_params is not None
        completions = [completion for output in outputs for completion in output.outputs]
        prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        self._span.set(
            {
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.prompt_tokens": prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": sum(output.num_cached_tokens for output in outputs),
            }
        )
        if pools:
            return
        self._say_parameters(requests[0])
        generated = sum(len(completion.token_ids) for completion in completions)
        self._span.set(
            {
                "gen_ai.usage.output_tokens": generated,
                "gen_ai.usage.completion_tokens": generated,
                "gen_ai.usage.num_sequences": len(completions),
                "gen_ai.response.finish_reasons": [completion.finish_reason or "abort" for completion in completions],
            }
        )
        self._add_times(outputs, began)

    def end(self, status: int, seconds: float, error: "ApiError | None", summary: "Summary | None") -> None:
        """status: 0 if no response was sent."""
        if summary is not None:
            model = summary.model
            self._span.set(
                {
                    "gen_ai.request.model": model,
                    "gen_ai.response.model": model,
                    "gen_ai.response.id": summary.response_id,
                    "gen_ai.latency.e2e": seconds,
                }
            )
        if status:
            self._span.set({"http.response.status_code": status})
        if error is None:
            self._span.end(None if 0 < status < 400 else str(status or 500), is_ours=not 0 < status < 500)
            return
        ours = error.status_code >= 500
        self._span.end(error.code or str(error.status_code), error.logged if ours else None, ours)

    def _say_parameters(self, request: "ProcessedRequest") -> None:
        params = request.params
        self._span.set(
            {
                "gen_ai.request.max_tokens": request.core_requests[0].max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
                "gen_ai.request.seed": params.seed,
                "gen_ai.request.n": params.n,
                "gen_ai.request.choice.count": params.n if params.n > 1 else None,
                "gen_ai.request.presence_penalty": params.presence_penalty or None,
                "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
            }
        )

    def _add_times(self, outputs: "Sequence[RequestOutput]", began: float) -> None:
        """Add spans for each prompt's waiting time, prefill and output. vLLM's latencies are those of the first
        prompt."""
        for index, output in enumerate(outputs[:MOST_PROMPTS]):
            times = output.metrics
            if times is None or not times.first_token_ts:
                continue
            queued = times.queued_ts
            first = times.first_token_ts
            last = times.last_token_ts
            scheduled = min(max(times.scheduled_ts, queued), first)  # another machine's clock may differ
            about = {"gen_ai.prompt.index": index} if len(outputs) > 1 else {}
            tokens = len(output.prompt_token_ids)
            cached = output.num_cached_tokens
            self._span.add_child("queue", queued, scheduled, about)
            self._span.add_child(
                "prefill",
                scheduled,
                first,
                {**about, "gen_ai.usage.input_tokens": tokens, "gen_ai.usage.cache_read.input_tokens": cached},
            )
            self._span.add_child(
                "decode", first, last, {**about, "gen_ai.usage.output_tokens": times.num_generation_tokens}
            )
            if index == 0:
                self._span.set(
                    {
                        "gen_ai.latency.time_in_queue": scheduled - queued,
                        "gen_ai.latency.time_to_first_token": first - began,
                        "gen_ai.latency.time_in_model_prefill": first - scheduled,
                        "gen_ai.latency.time_in_model_decode": last - first,
                        "gen_ai.latency.time_in_model_inference": last - scheduled,
                    }
                )
