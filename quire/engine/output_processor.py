"""From EngineCoreOutputs to RequestOutputs: detokenizing, stop strings, logprobs, gathering a prompt's completions."""

import time
from dataclasses import dataclass

from quire.engine.logprobs import LogprobUnpacker
from quire.engine.processor import ProcessedRequest
from quire.messages.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from quire.messages.outputs import CompletionOutput, RequestOutput, RequestStateStats
from quire.messages.sampling_params import RequestOutputKind
from quire.messages.step import Logprobs
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Sequence:
    """One completion on its way."""

    request: RequestOutput
    completion: CompletionOutput
    final_only: bool
    interval: int  # tokens between two outputs
    detokenizer: IncrementalDetokenizer | None
    logprobs: LogprobUnpacker
    num_told: int = 0  # tokens of the last output that was passed on


class OutputProcessor:
    """Keeps the unfinished completions. `process` updates the RequestOutputs that `add` returned, in place."""

    def __init__(self, tokenizer: Tokenizer, stream_interval: int = 1) -> None:
        self.tokenizer, self.stream_interval = tokenizer, stream_interval
        self._sequences: dict[str, _Sequence] = {}  # by core request id

    def add(self, request: ProcessedRequest) -> RequestOutput:
        output = RequestOutput(request.request_id, request.prompt, request.prompt_token_ids)
        queued_at = request.core_requests[0].arrival_time
        output.metrics = RequestStateStats(arrival_time=time.time(), queued_ts=queued_at)
        params = request.params
        final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        for index, core_request in enumerate(request.core_requests):
            detokenizer, token_bytes, partial = None, None, b""
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
                token_bytes, partial = self.tokenizer.token_bytes, detokenizer.partial
            completion = CompletionOutput(index, "", [])
            if params.num_logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            output.outputs.append(completion)
            unpacker = LogprobUnpacker(token_bytes, partial, likeliest=params.logprob_token_ids is None)
            interval = max(self.stream_interval, params.stream_interval or 1)
            sequence = _Sequence(output, completion, final_only, interval, detokenizer, unpacker)
            self._sequences[core_request.request_id] = sequence
        return output

    def process(self, outputs: list[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Apply a step's outputs. Returns the requests that changed (those with FINAL_ONLY when they are finished,
        others once in stream_interval tokens), and core request ids that a stop string ended."""
        changed: dict[str, RequestOutput] = {}
        to_abort: list[str] = []
        now = time.monotonic()
        for output in outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue  # ended by a stop string or aborted while this was on its way
            request, completion, detokenizer = sequence.request, sequence.completion, sequence.detokenizer
            new_token_ids, finish_reason, stop_reason = output.new_token_ids, output.finish_reason, output.stop_reason
            if not completion.token_ids and completion.index == 0:
                request.num_cached_tokens = output.num_cached_tokens
            completion.token_ids += new_token_ids
            if new_token_ids:
                self._note(request.metrics, output, now)
            if output.logprobs is not None:
                self._add_logprobs(sequence, new_token_ids, output.logprobs)
            if output.prompt_logprobs is not None and request.prompt_logprobs is not None:
                token_bytes = None if detokenizer is None else self.tokenizer.token_bytes
                unpacker = LogprobUnpacker(token_bytes)
                unpacker.skip(request.prompt_token_ids[0])
                request.prompt_logprobs.extend(unpacker.unpack(output.prompt_logprobs))
            if detokenizer is not None:
                stop = detokenizer.append(new_token_ids, finish_reason is FinishReason.STOP)
                if stop is not None:
                    if finish_reason is None:
                        to_abort.append(output.request_id)
                    finish_reason, stop_reason = FinishReason.STOP, stop
                completion.text += detokenizer.next_delta(finish_reason is not None)
            if finish_reason is not None:
                self._finish(output.request_id, finish_reason, stop_reason)
            if finish_reason is not None or self._is_due(sequence):
                sequence.num_told = len(completion.token_ids)
                if not sequence.final_only or request.finished:
                    changed[request.request_id] = request
        return list(changed.values()), to_abort

    def abort(self, core_requests: list[EngineCoreRequest]) -> list[str]:
        """Mark the completions that still run as aborted; their core request ids."""
        running = [r.request_id for r in core_requests if r.request_id in self._sequences]
        for request_id in running:
            self._finish(request_id, FinishReason.ABORT, None)
        return running

    def fail(self, request_id: str, reason: str) -> list[RequestOutput]:
        """End a completion by its core request id; its request, if there is one."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return []
        self._finish(request_id, FinishReason.ERROR, reason)
        return [sequence.request]

    @property
    def num_unfinished(self) -> int:
        """Completions that have not ended."""
        return len(self._sequences)

    @staticmethod
    def _note(metrics: RequestStateStats | None, output: EngineCoreOutput, now: float) -> None:
        assert metrics is not None
        if not metrics.first_token_ts:
            metrics.scheduled_ts = output.scheduled_at or now
            metrics.first_token_ts = now
            metrics.first_token_latency = now - metrics.queued_ts
        metrics.last_token_ts = now
        metrics.num_generation_tokens += len(output.new_token_ids)

    @staticmethod
    def _is_due(sequence: _Sequence) -> bool:
        """Whether an output is to be passed on before the last one: the first, and then one an interval."""
        new = len(sequence.completion.token_ids) - sequence.num_told
        return not sequence.num_told or new >= sequence.interval

    @staticmethod
    def _add_logprobs(sequence: _Sequence, token_ids: list[int], packed: Logprobs) -> None:
        completion = sequence.completion
        made = sequence.logprobs.unpack(packed)[: len(token_ids)]
        assert completion.logprobs is not None
        assert completion.cumulative_logprob is not None
        completion.logprobs += made
        completion.cumulative_logprob += sum(of[token_id].logprob for token_id, of in zip(token_ids, made, strict=True))

    def _finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None) -> None:
        sequence = self._sequences.pop(request_id)
        sequence.completion.finish_reason, sequence.completion.stop_reason = reason.value, stop_reason
        sequence.request.finished = all(c.finished() for c in sequence.request.outputs)


class DeltaReader:
    """Cuts what is new since the last look out of a RequestOutput that grows (RequestOutputKind.DELTA)."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int, str | None]] = {}  # completion -> (tokens, characters, finish reason)
        self._told_prompt_logprobs = False

    def read(self, output: RequestOutput) -> RequestOutput:
        """Only the completions that have news; prompt_logprobs are in the first output that has them all."""
        prompt_logprobs = None
        if not self._told_prompt_logprobs and len(output.prompt_logprobs or ()) == len(output.prompt_token_ids):
            prompt_logprobs, self._told_prompt_logprobs = output.prompt_logprobs, True
        news = []
        for completion in output.outputs:
            tokens, characters, reason = self._seen.get(completion.index, (0, 0, None))
            now = len(completion.token_ids), len(completion.text), completion.finish_reason
            if now != (tokens, characters, reason):
                self._seen[completion.index] = now
                logprobs = None if completion.logprobs is None else completion.logprobs[tokens:]
                text, token_ids = completion.text[characters:], completion.token_ids[tokens:]
                news.append(
                    CompletionOutput(
                        completion.index, text, token_ids, completion.cumulative_logprob, logprobs,
                        completion.finish_reason, completion.stop_reason,
                    )
                )  # fmt: skip
        # Not with dataclasses.replace, which would be a tenth of what a streamed token costs.
        return RequestOutput(
            output.request_id, output.prompt, output.prompt_token_ids, news, output.finished,
            output.num_cached_tokens, prompt_logprobs, output.metrics,
        )  # fmt: skip
