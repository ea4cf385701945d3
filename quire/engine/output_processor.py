"""Turns EngineCoreOutputs into RequestOutputs: detokenizing, stop strings, logprobs, grouping of completions."""

import time
from dataclasses import dataclass

from quire.config.engine import SchedulerConfig
from quire.engine.logprobs import LogprobUnpacker
from quire.engine.processor import ProcessedRequest
from quire.messages.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from quire.messages.outputs import CompletionOutput, RequestOutput, RequestStateStats, SpecDecodeMetrics
from quire.messages.sampling_params import RequestOutputKind
from quire.messages.step import Logprobs
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Sequence:
    """An unfinished completion."""

    request: RequestOutput
    completion: CompletionOutput
    final_only: bool
    interval: int  # tokens between two outputs
    detokenizer: IncrementalDetokenizer | None
    logprobs: LogprobUnpacker
    num_reported: int = 0  # tokens in the last reported output


class OutputProcessor:
    """Keeps the unfinished completions. `process` changes the RequestOutputs that `add` returned, in place."""

    def __init__(self, tokenizer: Tokenizer, options: SchedulerConfig) -> None:
        self.tokenizer = tokenizer
        self.stream_interval = options.stream_interval
        self._num_spec_tokens = options.speculation.num_speculative_tokens if options.speculation else 0
        self._each_verification = options.per_request_spec_decode_metrics == "detailed"
        self._sequences: dict[str, _Sequence] = {}  # by core request id

    def add(self, request: ProcessedRequest) -> RequestOutput:
        output = RequestOutput(request.request_id, request.prompt, request.prompt_token_ids)
        output.kv_transfer_params = request.kv_transfer_params
        output.encoder_prompt = request.encoder_prompt
        output.encoder_prompt_token_ids = request.encoder_prompt_token_ids
        queued_at = request.core_requests[0].arrival_time
        output.metrics = RequestStateStats(arrival_time=time.time(), queued_ts=queued_at)
        params = request.params
        final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        for index, core_request in enumerate(request.core_requests):
            detokenizer = None
            token_bytes = None
            partial = b""
            if params.detokenize:
                detokenizer = IncrementalDetokenizer(
                    self.tokenizer,
                    request.prompt_token_ids,
                    skip_special_tokens=params.skip_special_tokens,
                    spaces_between_special_tokens=params.spaces_between_special_tokens,
                    stop=params.stop_strings,
                    include_stop_str_in_output=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                )
                token_bytes = self.tokenizer.token_bytes
                partial = detokenizer.partial
            completion = CompletionOutput(index, "", [])
            if params.num_logprobs is not None:
                completion.logprobs = []
                completion.cumulative_logprob = 0.0
            if self._num_spec_tokens:
                per_step: list[tuple[int, int]] | None = [] if self._each_verification else None
                completion.spec_decode_metrics = SpecDecodeMetrics(self._num_spec_tokens, per_step=per_step)
            output.outputs.append(completion)
            unpacker = LogprobUnpacker(token_bytes, partial, likeliest=params.logprob_token_ids is None)
            interval = max(self.stream_interval, params.stream_interval or 1)
            sequence = _Sequence(output, completion, final_only, interval, detokenizer, unpacker)
            self._sequences[core_request.request_id] = sequence
        return output

    def process(  # noqa: C901, PLR0912  # its loop runs for each token, where calls cost more than branches
        self, outputs: list[EngineCoreOutput]
    ) -> tuple[list[RequestOutput], list[str]]:
        """Apply a step's outputs. Returns the changed requests and the ids of core requests that a stop string ended.

        A request with FINAL_ONLY is returned when it has finished, any other one every stream_interval tokens.
        """
        changed: dict[str, RequestOutput] = {}
        to_abort: list[str] = []
        now = time.monotonic()
        for output in outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue  # ended by a stop string or aborted while this output was in transit
            request = sequence.request
            completion = sequence.completion
            detokenizer = sequence.detokenizer
            new_token_ids = output.new_token_ids
            finish_reason = output.finish_reason
            stop_reason = output.stop_reason
            if not completion.token_ids and completion.index == 0:
                request.num_cached_tokens = output.num_cached_tokens
            completion.token_ids += new_token_ids
            if output.num_draft_tokens and completion.spec_decode_metrics is not None:
                completion.spec_decode_metrics.verified(output.num_draft_tokens, output.num_accepted_tokens)
            completion.pooled = output.pooled
            if new_token_ids:
                self._update_metrics(request.metrics, output, now)
            if output.logprobs is not None:
                self._add_logprobs(sequence, new_token_ids, output.logprobs)
            if output.prompt_logprobs is not None and request.prompt_logprobs is not None:
                token_bytes = None if detokenizer is None else self.tokenizer.token_bytes
                unpacker = LogprobUnpacker(token_bytes)
                unpacker.skip(request.prompt_token_ids[0])
                request.prompt_logprobs.extend(unpacker.unpack(output.prompt_logprobs))
            if detokenizer is not None:
                by_token = finish_reason is FinishReason.STOP and not isinstance(stop_reason, str)
                if len(new_token_ids) > 1:  # a grammar has forced some
                    stop = self._append(sequence, detokenizer, new_token_ids, by_token)
                else:
                    stop = detokenizer.append(new_token_ids, by_token)
                if stop is not None:
                    if finish_reason is None:
                        to_abort.append(output.request_id)
                    finish_reason = FinishReason.STOP
                    stop_reason = stop
                completion.text += detokenizer.next_delta(finish_reason is not None)
            if finish_reason is not None:
                self._finish(output.request_id, finish_reason, stop_reason)
            if finish_reason is not None or self._is_due(sequence):
                sequence.num_reported = len(completion.token_ids)
                if not sequence.final_only or request.finished:
                    changed[request.request_id] = request
        return list(changed.values()), to_abort

    def abort(self, core_requests: list[EngineCoreRequest]) -> list[str]:
        """Mark the unfinished completions as aborted. Returns their core request ids."""
        running = [r.request_id for r in core_requests if r.request_id in self._sequences]
        for request_id in running:
            self._finish(request_id, FinishReason.ABORT, None)
        return running

    def fail(self, request_id: str, reason: str) -> list[RequestOutput]:
        """End a completion with an error. Returns its request, or [] for an unknown core request id."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return []
        self._finish(request_id, FinishReason.ERROR, reason)
        return [sequence.request]

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished completions."""
        return len(self._sequences)

    @staticmethod
    def _update_metrics(metrics: RequestStateStats | None, output: EngineCoreOutput, now: float) -> None:
        assert metrics is not None
        if not metrics.first_token_ts:
            metrics.scheduled_ts = output.scheduled_at or now
            metrics.first_token_ts = now
            metrics.first_token_latency = now - metrics.queued_ts
        metrics.last_token_ts = now
        metrics.num_generation_tokens += len(output.new_token_ids)

    @staticmethod
    def _append(
        sequence: _Sequence, detokenizer: IncrementalDetokenizer, token_ids: list[int], by_token: bool
    ) -> str | None:
        """Detokenize several tokens, up to a stop string. Tokens after it are removed from the completion."""
        for count, token_id in enumerate(token_ids, 1):
            stop = detokenizer.append([token_id], by_token and count == len(token_ids))
            if stop is not None:
                output = sequence.completion.token_ids
                num_excess = len(token_ids) - count
                del output[len(output) - num_excess :]
                assert sequence.request.metrics is not None
                sequence.request.metrics.num_generation_tokens -= num_excess
                return stop
        return None

    @staticmethod
    def _is_due(sequence: _Sequence) -> bool:
        """Whether to report an unfinished completion: at its first token, and then once per interval of tokens."""
        new = len(sequence.completion.token_ids) - sequence.num_reported
        return not sequence.num_reported or new >= sequence.interval

    @staticmethod
    def _add_logprobs(sequence: _Sequence, token_ids: list[int], packed: Logprobs) -> None:
        completion = sequence.completion
        unpacked = sequence.logprobs.unpack(packed)[: len(token_ids)]
        assert completion.logprobs is not None
        assert completion.cumulative_logprob is not None
        completion.logprobs += unpacked
        pairs = zip(token_ids, unpacked, strict=True)
        completion.cumulative_logprob += sum(logprobs[token_id].logprob for token_id, logprobs in pairs)

    def _finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None) -> None:
        sequence = self._sequences.pop(request_id)
        sequence.completion.finish_reason = reason.value
        sequence.completion.stop_reason = stop_reason
        sequence.request.finished = all(c.finished() for c in sequence.request.outputs)


class DeltaReader:
    """Returns the new part of a growing RequestOutput at each call of `read` (RequestOutputKind.DELTA)."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int, str | None]] = {}  # completion -> (tokens, characters, finish reason)
        self._reported_prompt_logprobs = False

    def read(self, output: RequestOutput) -> RequestOutput:
        """Return the new part of each completion that has one. prompt_logprobs are returned once, when they are
        complete."""
        prompt_logprobs = None
        if not self._reported_prompt_logprobs and len(output.prompt_logprobs or ()) == len(output.prompt_token_ids):
            prompt_logprobs = output.prompt_logprobs
            self._reported_prompt_logprobs = True
        news = []
        for completion in output.outputs:
            tokens, characters, reason = self._seen.get(completion.index, (0, 0, None))
            now = len(completion.token_ids), len(completion.text), completion.finish_reason
            if now != (tokens, characters, reason):
                self._seen[completion.index] = now
                logprobs = None if completion.logprobs is None else completion.logprobs[tokens:]
                text = completion.text[characters:]
                token_ids = completion.token_ids[tokens:]
                news.append(
                    CompletionOutput(
                        completion.index,
                        text,
                        token_ids,
                        completion.cumulative_logprob,
                        logprobs,
                        completion.finish_reason,
                        completion.stop_reason,
                        completion.spec_decode_metrics,
                    )
                )
        # dataclasses.replace would take a tenth of the time per streamed token.
        return RequestOutput(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            news,
            output.finished,
            output.num_cached_tokens,
            prompt_logprobs,
            output.metrics,
            output.kv_transfer_params,
            output.encoder_prompt,
            output.encoder_prompt_token_ids,
        )
