"""Logs a line for each request when it ends and, if enabled, when it arrives.

The request's span ends when that line is logged.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from quire.config.engine import ServerConfig
from quire.engine.processor import ProcessedRequest
from quire.messages.outputs import RequestOutput
from quire.observability.logging import logger, printable
from quire.server.access_log import AccessLog
from quire.server.errors import ApiError, path_in
from quire.server.tracing import RequestTrace

MAX_PATH, MAX_MESSAGE, MAX_PARAMETERS = 200, 500, 2000  # characters in the log


@dataclass
class Summary:
    """The additional log fields of a request that generates text or computes vectors.

    response_id: the id in the response. model: the name that the client requested. is_other_model: whether that differs
    from the server's first model. error: an error after the response status was sent. text, fields: the tokens and
    times, for people and for programs; empty until the request has run.
    """

    response_id: str
    model: str
    is_other_model: bool
    error: ApiError | None = None
    text: str = ""
    fields: dict[str, Any] | None = None

    def count(self, outputs: Sequence[RequestOutput], began: float) -> None:
        """Record the tokens and times of a request that has ended or was cut short. began: its arrival, by
        time.monotonic()."""
        if not outputs:
            return
        prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        cached_tokens = sum(output.num_cached_tokens for output in outputs)
        self.text = f"{prompt_tokens} prompt tokens ({cached_tokens} cached)"
        self.fields = {"prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens}
        completions = [completion for output in outputs for completion in output.outputs]
        if all(completion.pooled is not None for completion in completions):
            return
        reasons = Counter(completion.finish_reason or "abort" for completion in completions)
        reason = ", ".join(f"{n} {reason}" if len(reasons) > 1 else reason for reason, n in sorted(reasons.items()))
        generated = sum(len(completion.token_ids) for completion in completions)
        self.text += f", {generated} generated ({reason})"
        self.fields |= {"completion_tokens": generated, "finish_reason": reason, "completions": len(completions)}
        times = [(o.metrics, o) for o in outputs if o.metrics is not None and o.metrics.first_token_ts]
        if times:
            first = min(metrics.first_token_ts for metrics, _ in times) - began
            self.text += f", first token after {first:.3f} s"
            self.fields["time_to_first_token_seconds"] = round(first, 6)
        # The completions of a prompt run in parallel, so the longest one shows how long a token takes.
        intervals = sum(max(len(completion.token_ids) for completion in output.outputs) - 1 for _, output in times)
        if intervals > 0:
            each = sum(metrics.last_token_ts - metrics.first_token_ts for metrics, _ in times) / intervals
            self.text += f", {1000 * each:.1f} ms per token"
            self.fields["time_per_output_token_seconds"] = round(each, 6)


class RequestLog:
    """Logs how requests ended. Rejected requests are always logged, others unless the options disable it."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError if the access log cannot be written."""
        self._logs_successes = not config.disable_uvicorn_access_log
        self._quiet_paths = frozenset(config.disable_access_log_for_endpoints.split(","))
        self._logs_arrivals = config.enable_log_requests or config.log_prompts
        self._logs_prompts = config.log_prompts
        self._max_length = config.max_log_len
        self._access_log = AccessLog(config.access_log) if config.access_log else None

    def received(self, request_id: str, requests: Sequence[ProcessedRequest]) -> None:
        """Log a request that is about to run."""
        if not self._logs_arrivals:
            return
        params: Any = requests[0].core_requests[0].pooling_params or requests[0].params
        usual = type(params)()
        given = {name: getattr(params, name) for name in params.__struct_fields__ if name != "output_kind"}
        unusual = {name: value for name, value in given.items() if value != getattr(usual, name)}
        parameters = printable(", ".join(f"{name}={value!r}" for name, value in unusual.items()), MAX_PARAMETERS)
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        fields = {"request_id": request_id, "prompt_tokens": num_tokens, "parameters": parameters}
        text = "Request %s received: %d prompt tokens, %s"
        logger.info(text, request_id, num_tokens, parameters or "default parameters", extra={"fields": fields})
        if not self._logs_prompts:
            return
        for request in requests:
            prompt = None if request.prompt is None else request.prompt[: self._max_length]
            token_ids = request.prompt_token_ids[: self._max_length]
            fields = {"request_id": request_id, "prompt": prompt, "prompt_token_ids": token_ids}
            logger.info("Request %s: prompt %r, token ids %s", request_id, prompt, token_ids, extra={"fields": fields})

    def ended(self, scope: Scope, status: int, sent: int) -> None:
        """Log the end of a response. status: 0 if none was sent. sent: bytes of its body."""
        path = path_in(scope)
        if self._access_log is not None and path not in self._quiet_paths:
            self._access_log.write(scope, status or 500, sent)
        if not scope["state"].get("logged_later") or "error" in scope["state"]:
            self._close(scope, status)

    def later(self, scope: Scope) -> Callable[[], None]:
        """Postpone the line of a request that continues after its response has ended. The returned function logs it and
        ends the span."""
        kept = {**scope, "state": dict(scope["state"])}
        del scope["state"]["summary"]
        scope["state"].pop("trace", None)
        scope["state"]["logged_later"] = True
        return lambda: self._close(kept, 200)

    def _close(self, scope: Scope, status: int) -> None:
        state = scope["state"]
        # Removed from the state, which uvicorn keeps until the connection's next request arrives.
        summary: Summary | None = state.pop("summary", None)
        error: ApiError | None = state.get("error")
        if error is None and summary is not None:
            error = summary.error
        seconds = time.monotonic() - state["began"]
        trace: RequestTrace | None = state.pop("trace", None)
        if trace is not None:
            trace.end(status, seconds, error, summary)
        self._log(scope, status, seconds, error, summary)

    def _log(self, scope: Scope, status: int, seconds: float, error: ApiError | None, summary: Summary | None) -> None:
        path = path_in(scope)
        level = _level((status or 500) if error is None else error.status_code)
        is_of_page = path.startswith("/ui/")  # the server's page polls every second
        quiet = level == logging.INFO and (is_of_page or path in self._quiet_paths or not self._logs_successes)
        if quiet or not logger.isEnabledFor(level):
            return
        request_id = scope["state"]["request_id"]
        client = scope.get("client")
        address = f"{printable(str(client[0]), MAX_PATH)}:{client[1]}" if client else "unix socket"
        fields: dict[str, Any] = {
            "request_id": request_id,
            "client": address,
            "method": scope["method"],
            "path": printable(path, MAX_PATH),
            "status": status or 500,
            "seconds": round(seconds, 6),
        }
        about = []
        if error is not None:
            message = printable(error.detail if self._logs_prompts else error.logged, MAX_MESSAGE)
            came_late = 0 < status < 400 and error.status_code != 499
            about.append(f"the answer ended with error {error.status_code}, {message}" if came_late else message)
            fields |= {"error": message, "error_status": error.status_code}
            fields |= {
                f"error_{n}": printable(v, MAX_PATH)
                for n, v in (("code", error.code), ("param", error.param))
                if v is not None
            }
        elif not status:
            about.append("no answer was sent")
        if summary is not None:
            fields |= {"response_id": summary.response_id, "model": summary.model, **(summary.fields or {})}
            if request_id not in summary.response_id:
                about.append(summary.response_id)
            if summary.is_other_model:
                about.append(f"model {printable(summary.model, MAX_PATH)}")
            if summary.text:
                about.append(summary.text)
        logger.log(
            level,
            "%s %s %s %d in %.3f s, request %s%s%s",
            address,
            scope["method"],
            fields["path"],
            fields["status"],
            seconds,
            request_id,
            ": " if about else "",
            "; ".join(about),
            extra={"fields": fields},
        )


def _level(status: int) -> int:
    if status < 400 or status == 499:  # the client closed the connection
        return logging.INFO
    return logging.WARNING if status < 500 else logging.ERROR
