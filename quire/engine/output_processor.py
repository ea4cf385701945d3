"""From EngineCoreOutputs to RequestOutputs: detokenizing, stop strings, gathering a prompt's completions."""

from dataclasses import dataclass

from quire.engine.processor import ProcessedRequest
from quire.messages.engine import EngineCoreOutput, FinishReason
from quire.messages.outputs import CompletionOutput, RequestOutput
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer


@dataclass
class _Sequence:
    """One completion on its way."""

    request: RequestOutput
    completion: CompletionOutput
    detokenizer: IncrementalDetokenizer | None


class OutputProcessor:
    """Keeps the unfinished completions. `process` updates the RequestOutputs that `add` returned, in place."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._sequences: dict[str, _Sequence] = {}  # by core request id

    def add(self, request: ProcessedRequest) -> RequestOutput:
        output = RequestOutput(request.request_id, request.prompt, request.prompt_token_ids)
        params = request.params
        for index, core_request in enumerate(request.core_requests):
            detokenizer = None
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
            completion = CompletionOutput(index, "", [])
            output.outputs.append(completion)
            self._sequences[core_request.request_id] = _Sequence(output, completion, detokenizer)
        return output

    def process(self, outputs: list[EngineCoreOutput]) -> tuple[list[RequestOutput], list[str]]:
        """Apply a step's outputs. Returns the requests that changed, and core request ids that a stop string ended."""
        changed: dict[str, RequestOutput] = {}
        to_abort: list[str] = []
        for output in outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue  # ended by a stop string or aborted while this was on its way
            request, completion = sequence.request, sequence.completion
            changed[request.request_id] = request
            if completion.index == 0:
                request.num_cached_tokens = output.num_cached_tokens
            completion.token_ids.extend(output.new_token_ids)
            stop = None
            if sequence.detokenizer is not None:
                by_token = output.finish_reason is FinishReason.STOP
                stop = sequence.detokenizer.append(output.new_token_ids, by_token)
                finished = stop is not None or output.finish_reason is not None
                completion.text += sequence.detokenizer.next_delta(finished)
            if stop is not None and output.finish_reason is None:
                to_abort.append(output.request_id)
            if stop is not None:
                self._finish(output.request_id, FinishReason.STOP, stop)
            elif output.finish_reason is not None:
                self._finish(output.request_id, output.finish_reason, output.stop_reason)
        return list(changed.values()), to_abort

    def abort(self, request: ProcessedRequest) -> list[str]:
        """Mark the completions that still run as aborted; their core request ids."""
        running = [r.request_id for r in request.core_requests if r.request_id in self._sequences]
        for request_id in running:
            self._finish(request_id, FinishReason.ABORT, None)
        return running

    def _finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None) -> None:
        sequence = self._sequences.pop(request_id)
        sequence.completion.finish_reason, sequence.completion.stop_reason = reason.value, stop_reason
        sequence.request.finished = all(c.finished() for c in sequence.request.outputs)
